"""What a program can tell comgra_decl about itself."""
