"""From and to optax: its states, and an optimizer for its loops."""
