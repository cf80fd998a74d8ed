"""The bilinear block, the model families, and what every stage needs to load, read and write."""
