"""Fixed inputs, measures and reports that show what an archive costs in quality, against dense attention and peers."""
