"""How a network is divided into blocks: its parts, the places to cut them, the shortest tick."""
