"""Messages of their own path: who is where when, and what a unit does with what they leave."""
