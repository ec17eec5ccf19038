"""The wire: what requests and answers look like. Knows no engine and no HTTP.

errors.py           one sentence for each malformed request
leyline_object.py   the `leyline` object in, the report out
messages.py         chat messages, made uniform for chat templates
openai.py           requests of the OpenAI API
openai_answers.py   its answers, chunks and errors
anthropic.py        requests of Anthropic's Messages API; anthropic_messages.py their messages
anthropic_answers.py   its answers, events and errors
context_management.py  its context edits; clearable.py what of a conversation they can clear
"""
