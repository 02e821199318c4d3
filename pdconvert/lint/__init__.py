"""Static rules over ML programs: what is known to keep a program from the Neural Engine, or to slow it there.

A rule is a value (`rule.Rule`): an identifier, a severity, a source, a mend, and one small function that
looks at a function or a package. `rules.RULES` lists them all. No rule says that something *will* run on the
Neural Engine, and nothing found means only that nothing known was found.
"""
