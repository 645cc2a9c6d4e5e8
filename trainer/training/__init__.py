"""What a step computes: anchors and labels, loss, gradients, the optimizer's update."""
