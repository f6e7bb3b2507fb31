"""Code that runs in the process of a script, imported as `sitecustomize`."""
