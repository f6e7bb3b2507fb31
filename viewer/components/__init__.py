"""The viewer's own browser components: graph, step bar and URL."""
