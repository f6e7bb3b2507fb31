"""What runs within the process of a script: found by its interpreter as `sitecustomize`."""
