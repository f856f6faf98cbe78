"""Text and images of the Hugging Face `datasets` library, made into batches that transformers' models take.

The way of a sample: `loading` finds it on the Hub or in files, `columns` and `labels` say what is what in it,
`tokenising` makes token ids of it (`packing` joins them to blocks of equal length), `checks` refuses what a model could
not take, and `tokens` fetches whole batches. `images` does the same for pictures, when they are fetched.
"""
