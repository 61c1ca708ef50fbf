"""What llvm-mca's model of Sapphire Rapids says about the kernel's inner loops, as a table for the documentation."""
