"""Claims to prepared devices: the only room that changes a node.

`engine` is the way in. What one claim's prepare and unprepare do is in `prepare_claim` and `unprepare_claim`; `reconcile`
makes the node match: `plan` computes (pure), `journal` carries out the `effects` and undoes them, one step behind the
claim's record (`record`, `store`). `node_state` is what a node keeps on disk. The `janitor` does its `sweep`s beside.
"""
