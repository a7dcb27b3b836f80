"""The definition of a program: frozen data, the shapes of its layers, and limits."""
