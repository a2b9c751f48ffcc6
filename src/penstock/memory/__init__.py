"""Host memory with a place. Room: hold -- bytes and addresses, never plans or streams."""
