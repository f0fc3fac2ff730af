"""Text (floor 2): a session to tokens and back; tokenizer, renderer, parser, inspection."""
