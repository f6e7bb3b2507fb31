"""The bugs, by what they are about; importing a module registers those in it."""
