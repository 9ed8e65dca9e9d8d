from setuptools import setup

setup(
    name="phalanx",
    version="0.1.0",
    description="Transformer training with explicit tensor, pipeline and data parallelism",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[
        "core",
        "core.checkpoint",
        "core.comm",
        "core.data_parallel",
        "core.launch",
        "core.optimizer",
        "core.pipeline_parallel",
        "core.tensor_parallel",
        "data",
        "kernels",
        "models",
    ],
    install_requires=["numpy", "regex", "torch>=2.9,<2.15"],
    extras_require={
        "tokenizer": ["tokenizers"],
        "sentencepiece": ["sentencepiece"],
        "tiktoken": ["tiktoken"],
        "parquet": ["pyarrow"],
        "zst": ["zstandard"],
        "plots": ["matplotlib"],
    },
)
