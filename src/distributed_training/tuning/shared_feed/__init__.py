"""One feed for all trials of a search: each sample is preprocessed once, by workers that serve all of them.

What is shared. Trials differ in batch size, in seed, in how far they get; so batches are rarely the same. Samples are:
the plan names them by id, and what is random in one is a function of (seed, epoch, id) alone. So what is kept is
samples, one by one, and every trial gathers its own batches from them: bit for bit those that it would load for itself.
A sample that drew nothing random is the same in all epochs and under all seeds, and is kept for the whole search. One
that did is kept under its (seed, epoch), for the trials that train with that seed.

Who does what. On every machine of a search there is one service (`service.py`), which knows the samples that are there
and hands work to loader processes (`worker.py`). They write rows into memory without a name (`rows.py`), which the
service passes on to the trials as a file descriptor; a trial asks where its samples lie and gathers them itself
(`client.py`). Its loader tells what will be read next, so that the workers are ahead of it. To the trial all this is a
dataset: under any strategy, with any number of ranks, from any step on.

What is bounded. `tuning.feed_memory_mb` is all the memory there is (`shelves.py` decides what stays). A sample without
room is loaded by the trial itself. So is everything, with a warning, if the service is gone: the batches are the same,
they only take longer. A trial that dies, pauses or starts late changes nothing for the others; a worker that dies is
made anew and its samples are loaded again. Memory has no name, so nothing is left behind however the processes end.

What is not shared: batches that are more than their samples side by side (padded to the longest one, for example), and
samples whose shape varies. Trials load those for themselves, as they do where the search changes the data itself.
"""

from distributed_training.tuning.shared_feed.client import SharedData
from distributed_training.tuning.shared_feed.starting import SharedFeed

__all__ = ["SharedData", "SharedFeed"]
