"""The machine: one function an instruction, its encoding and its meaning side by side."""
