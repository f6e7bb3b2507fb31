"""One traced execution: its session, its folder, the facts about it, and its monitoring."""
