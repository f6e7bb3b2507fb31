"""Small trainings with one known bug each, and healthy ones: does a diagnosis find what is wrong?

Half of them (`tune`) may be looked at while rules are written and tuned. The others (`report`) have
other architectures, data and seeds, and are there to say how good the rules are.
"""
