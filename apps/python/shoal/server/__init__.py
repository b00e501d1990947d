"""The HTTP server of `shoal serve`: the OpenAI API over one LLM.

An answer's way: gate (who, how much) → routes (what is asked) → generation (requests that run) → pump (news from the
engine) → answers (deltas) → events (stream) or one JSON object folded from the same deltas.
"""
