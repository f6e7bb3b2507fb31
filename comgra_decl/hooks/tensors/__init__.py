"""Read tensors into slots: outputs, gradients, parameters, inputs, targets."""
