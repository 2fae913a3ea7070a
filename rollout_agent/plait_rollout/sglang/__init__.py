"""Everything that knows SGLang: the in-engine half, the adapter that drives it, the reload path.

`hook`, `stager`, `recorder` and what they use run inside SGLang's scheduler processes; `adapter`,
`reload` and `launch` run beside the engine and never import SGLang.
"""
