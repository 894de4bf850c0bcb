"""What is asked of a Hugging Face model: shape, prompt, attention, prefill, identity; knows no archive."""
