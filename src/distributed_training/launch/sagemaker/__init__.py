"""A training job on Amazon SageMaker: `dtrain launch --sagemaker -- train config.yaml`.

Here: `request` says what is asked of SageMaker and `packing` what travels there; `job` uploads, starts, follows
(`logs`) and brings the model back (`fetching`). In the container: `starting` is its first script, `entry` its first
Python, which starts the ranks of its machine and leaves the model where SageMaker looks for it (`exporting`).
"""
