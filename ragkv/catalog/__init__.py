"""Many archives in one folder, built under one model and one prompt prefix."""
