"""Browser components of the viewer, such as the graph, the step bar and the URL."""
