"""Files of data sets: from the network, out of their archives and formats, safely."""
