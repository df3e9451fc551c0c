"""Two small Qwen3-VL models that really answer questions, trained from scratch on a CPU. See README.md here."""
