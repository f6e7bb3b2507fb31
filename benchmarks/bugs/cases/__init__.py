"""The bugs, by topic; importing a module registers its bugs."""
