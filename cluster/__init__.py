"""What users touch, and what spans engines. Ray yes, torch no."""
