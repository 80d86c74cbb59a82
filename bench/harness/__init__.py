"""How contenders are started, measured in turn and recorded."""
