"""What a program is: frozen data, the shapes of its layers, and bounds."""
