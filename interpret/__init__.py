"""Read a converted model from its weights: a bilinear block is a third-order tensor."""
