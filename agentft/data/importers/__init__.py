"""Sessions of other agents become ETAI records (floor 3): one file a format.

    report = import_paths(["logs/", "hf:owner/name:train"], "sessions.jsonl")     # agentft.data.importers.commands

``sources`` finds documents in files, folders, tables and hub data sets; ``detect`` says what each one is; the
format's module turns it into a record; ``commands`` checks, counts and writes. Rules that hold for every format:

- An exit code that the source does not state is null, and so is −1, which these agents write for "not known".
- A tool keeps the name and the arguments that the source gives it; arguments that are no JSON object are kept as
  ``{"_raw": text}``. Calls made in one turn become consecutive steps; the turn's text is the first one's thought.
- A turn in which the agent only talks and the user answers becomes a step of the tool ``message`` whose result is
  the answer; the last such turn is ``final_output``. A user who interrupts is kept as ``user_message`` in the
  result of the step before.
- ``final_output`` is what the agent wrote at the end, never a diff that its harness made.
- Output is ``combined``: these sources do not tell stdout from stderr.
- ``session_id`` is the source's where it has one, else a stable hash of the content (so the same session twice is a
  duplicate). An id of the *task* is no id of a session: it becomes a prefix of the hash.
- What has no place in a record (system prompts, demonstrations, tool lists, images, the reasoning behind the
  final text) is counted in the report's notes.
"""
