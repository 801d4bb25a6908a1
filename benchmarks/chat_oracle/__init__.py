"""A foreign oracle for chat templates: what a model writes under each template of TRL, found without specdec's code.

TRL's package holds the chat templates of many models, and for most of them a twin that marks the model's own tokens
by ``{% generation %}`` tags. They are read from the installed package; nothing of them is copied. ``conversations``
has the rows, ``said`` what they say and the forms a template may take it in, ``tokenizers`` the templates and a
tokenizer for each, ``expected`` what must be supervised, ``verdicts`` compares that with what specdec supervises, and
``faults`` has broken templates that the comparison must flag.
"""
