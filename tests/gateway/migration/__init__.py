"""Other routers' command lines."""
