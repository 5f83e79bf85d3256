"""Linear layers on a CPU, with weights in the order that oneDNN computes with (docs/decisions/0038)."""
