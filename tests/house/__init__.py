"""What holds for the repository: layers, style, pages, deployment files, packages, examples."""
