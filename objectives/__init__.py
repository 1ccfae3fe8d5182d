"""What a model learns from: next tokens, preferences, a teacher."""
