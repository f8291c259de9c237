"""Pages, and the programs that write some of them and draw their pictures."""
