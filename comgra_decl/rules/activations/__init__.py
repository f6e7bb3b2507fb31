"""Rules about activations: dead, saturated or badly scaled units and layers."""
