"""Who computes hidden states, who learns from them, and how the one reaches the other."""
