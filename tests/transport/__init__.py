"""Our wire, and plain sockets on an event loop."""
