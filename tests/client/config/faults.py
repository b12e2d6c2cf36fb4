"""Every fault of a config by the module that tells it, with the ways out that its sentence
names.
"""

from __future__ import annotations

import gzip

from smtrain.core.facts.engines import LNC
from tests.client.config.followed import (
    BOX,
    GPT2,
    MIXTRAL,
    NEOX,
    OUT,
    PLAN,
    QWEN2_MOE,
    QWEN35,
    WEIGHTS,
    both,
    case,
    prepared,
    remove,
    rename,
    shape,
    write,
)
from tests.conftest import LLAMA

MLFLOW = "arn:aws:sagemaker:us-west-2:123456789012:mlflow-app/ours"
GROUP = "arn:aws:sagemaker:us-west-2:123456789012:model-package-group/ours"
IMAGE13 = "123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:2.9.0-gpu-py312-cu130-ubuntu22.04"
IMAGE12 = IMAGE13.replace("cu130", "cu126")
HF13 = (
    IMAGE13.replace("mine:2.9.0", "huggingface-pytorch-training:2.9.0-transformers5.3.0") + "-v1.0"
)
YARN = {"type": "yarn", "factor": 4}
WHOLE = {"model_type": "seer", "text_config": {**LLAMA, "model_type": "llama"}}
LATENT = (
    {"model_type": "deepseek_v3", "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
    | {"v_head_dim": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    | {"q_lora_rank": 8, "n_group": 1, "topk_group": 1}
)
"""Sizes of a tiny DeepSeek-V3."""

MACHINES = (
    case(
        "local",
        {"compute.instance_count": 3},
        "does not divide the number of processes",
        ("change tp", {"parallel.tp": 1}),
        (" pp,", {"parallel.pp": 1}),
        ("compute.instance_count", {"compute.instance_count": 4}),
        ("compute.processes_per_instance", {"compute.processes_per_instance": 4}),
    ),
    case("local", {"parallel.dp": 3}, "parallel.dp: tp x pp x dp = 12, but", "dp = 1 would do"),
    case(
        "local",
        {"parallel.dp": 1, "compute.instance_count": 1},
        "but the processes are",
        ("change tp", {"parallel.tp": 1}),
        (" pp ", {"parallel.pp": 1}),
        ("or compute", {"compute.instance_count": 2}),
    ),
    case(
        "local",
        {"train.global_batch_size": 5, "parallel.micro_batch_size": 2},
        "is not a multiple of dp",
        "4 or",
        "6 would do",
    ),
    case(
        "local",
        {"train.seq_len": 33, "parallel.sequence_parallel": True},
        "cannot be cut over tp",
        ("use a multiple of tp", {"train.seq_len": 40}),
    ),
    case(
        "local",
        {"parallel.cp": 2, "parallel.pp": 1, "train.seq_len": 33},
        "train.seq_len: 33 cannot be cut over parallel.cp = 2",
        ("use a multiple of 2", {"train.seq_len": 34}),
    ),
    case(
        "local",
        {
            "parallel.cp": 2,
            "parallel.pp": 1,
            "train.seq_len": 34,
            "parallel.sequence_parallel": True,
        },
        "parallel.cp = 2 and, for parallel.sequence_parallel, tp = 2",
        ("use a multiple of 4", {"train.seq_len": 36}),
    ),
    case(
        "local",
        {"parallel.cp": 2},
        "parallel.tp, parallel.pp, parallel.cp: tp x pp x cp = 8 does not divide",
        ("change tp", {"parallel.tp": 1}),
        (" pp, ", {"parallel.pp": 1}),
        ("cp, ", {"parallel.cp": 1}),
        ("compute.instance_count", {"compute.instance_count": 4}),
        ("compute.processes_per_instance", {"compute.processes_per_instance": 4}),
    ),
    case(
        "local",
        {"parallel.cp": 2, "parallel.pp": 1, "parallel.dp": 3},
        "tp x pp x cp x dp = 12, but",
        "dp = 1 would do",
    ),
    case(
        "local",
        both(
            write("model/config.json", {**MIXTRAL, "num_local_experts": 3}),
            {"parallel.pp": 1, "parallel.ep": 3},
        ),
        "parallel.ep: 3 must divide dp = 2",
        "ep = 1 would do",
        (", or a divisor of both it and the experts", {"parallel.ep": 1}),
    ),
    case(
        "local",
        both(
            write("model/config.json", MIXTRAL),
            {"parallel": {"dp": 3, "ep": 3}, "train.global_batch_size": 9},
        ),
        "parallel.dp: tp x pp x dp = 3, but the processes are",
        "dp = 4, ep = 1 and train.global_batch_size = 12 would do",
        more=True,
    ),
    case(
        "gpu",
        {"network.subnets": ["subnet-1"]},
        "only one is set",
        ("a VPC needs both", {"network.security_group_ids": ["sg-1"]}),
    ),
    case(
        "gpu", {"compute.max_wait": "2d"}, "compute.max_wait: has no effect unless", "leave it out"
    ),
    case(
        "gpu",
        {"compute.max_wait": "1h", "compute.spot": True},
        "is shorter than compute.max_run",
        ("raise it", {"compute.max_wait": "2d"}),
    ),
    case(
        "gpu",
        {"compute.spot": True, "compute.capacity_wait": 60},
        "compute.capacity_wait: has no effect with",
        ("leave it out and raise that", {"compute.capacity_wait": OUT, "compute.max_wait": "2d"}),
    ),
    case(
        "gpu",
        {"compute.spot": True, "compute.fallback_instance_types": ["ml.p5e.48xlarge"]},
        "compute.fallback_instance_types: has no effect with",
        (
            "leave it out and raise that",
            {"compute.fallback_instance_types": OUT, "compute.max_wait": "2d"},
        ),
    ),
    case(
        "gpu",
        {"compute.pool_wait": 60},
        "compute.pool_wait: only",
        ("set that too", {"compute.keep_alive": 600}),
    ),
    case(
        "gpu",
        {"compute.instance_group": "g", "compute.keep_alive": 60},
        "no warm pool of instance groups",
        ("set only one", {"compute.instance_group": OUT}),
        ("of the two", {"compute.keep_alive": OUT}),
    ),
    case(
        "gpu",
        {"compute.spot": True, "compute.keep_alive": 60},
        "warm pools have no spot machines",
        ("set only one", {"compute.spot": OUT}),
        ("of the two", {"compute.keep_alive": OUT}),
    ),
    case(
        "gpu",
        {"compute.spot": True, "checkpoint.resume": False},
        "compute.spot: needs checkpoint.resume",
        "set checkpoint.resume: true",
        ("or compute.spot: false", {"compute.spot": False}),
    ),
    *(
        case(
            "local",
            {"output.s3_uri": OUT, "compute.fallback_regions": ["eu-north-1"], key: value},
            f"compute.fallback_regions: {key} is in one region only",
            ("leave one", {"compute.fallback_regions": OUT}),
            ("of the two out", {key: OUT}),
        )
        for key, value in {
            "output.s3_uri": "s3://bucket/out",
            "output.kms_key": "alias/key",
            "output.volume_kms_key": "alias/key",
            "checkpoint.s3_uri": "s3://bucket/checkpoints",
            "compute.training_plan": PLAN,
            "compute.keep_alive": 600,
            "output.model_package_group": GROUP,
        }.items()
    ),
    case(
        "local",
        {
            "output.s3_uri": OUT,
            "compute.fallback_regions": ["eu-north-1"],
            "network.subnets": ["subnet-1"],
            "network.security_group_ids": ["sg-1"],
        },
        "compute.fallback_regions: network.subnets is in one region only",
        ("leave one", {"compute.fallback_regions": OUT}),
        ("of the two out", {"network": OUT}),
    ),
    case(
        "local",
        {
            "output.s3_uri": OUT,
            "compute.fallback_regions": ["eu-north-1"],
            "track.mlflow": MLFLOW,
            "track.managed": True,
        },
        "compute.fallback_regions: track.managed is in one region only",
        ("leave one", {"compute.fallback_regions": OUT}),
        ("of the two out", {"track.managed": OUT}),
    ),
    case(
        "local",
        {
            "output.s3_uri": OUT,
            "compute.spot": True,
            "compute.fallback_regions": ["eu-north-1"],
        },
        "compute.fallback_regions: has no effect with",
        (
            "leave it out and raise that",
            {"compute.fallback_regions": OUT, "compute.max_wait": "2d"},
        ),
    ),
    case(
        "local",
        {"output.s3_uri": OUT, "compute.fallback_regions": ["eu-north-1", "eu-north-1"]},
        "compute.fallback_regions: names a region twice",
        ("leave it out", {"compute.fallback_regions": ["eu-north-1"]}),
    ),
    case(
        "local",
        {
            "output.s3_uri": OUT,
            "compute.fallback_regions": ["eu-north-1"],
            "compute.image": "111122223333.dkr.ecr.us-west-2.amazonaws.com/own:tag",
        },
        "compute.image: a registry of one region does not serve compute.fallback_regions",
        ("leave it out", {"compute.image": OUT}),
    ),
    case(
        "gpu",
        {"compute.training_plan": PLAN, "compute.spot": True},
        "compute.spot: cannot go with",
        ("leave one", {"compute.training_plan": OUT}),
        (" out", {"compute.spot": OUT}),
    ),
    *(
        case(
            base,
            {"compute.environment": {name: "x"}},
            "is not the name of a variable",
            ("letters, digits and _", {"compute.environment": {"A_1": "x"}}),
        )
        for base, name in (
            ("gpu", "$(touch X)"),
            ("slurm", "A B"),
            ("slurm", "1A"),
            ("gpu", ""),
            ("gpu", "A\n"),
        )
    ),
    case(
        "trn1",
        {"compute.environment": {"NEURON_CC_FLAGS": "--cache_dir=/opt/ml/checkpoints/c"}},
        "the compile cache",
        (
            "use an s3:// URI",
            {"compute.environment": {"NEURON_CC_FLAGS": "--cache_dir=s3://bucket/c"}},
        ),
        ("leave it to smtrain", {"compute.environment": OUT}),
    ),
    case(
        "gpu",
        {"track.wandb": {"project": "p", "key": {"secret": "a", "ssm": "b"}}},
        "track.wandb.key: must name one",
        ("secret", {"track.wandb.key.ssm": OUT}),
        ("ssm", {"track.wandb.key.secret": OUT}),
    ),
    case(
        "gpu",
        {"track.by": "job", "network.isolation": True},
        "cannot reach a tracker",
        "set track.by: client",
    ),
    case(
        "gpu",
        {"compute.role": "no role"},
        "is not a role's ARN",
        (
            "arn:aws:iam::123456789012:role/NAME",
            {"compute.role": "arn:aws:iam::123456789012:role/NAME"},
        ),
        ("or name", {"compute.role": "NAME"}),
    ),
    case(
        "slurm",
        {"cluster.shared": OUT},
        "cluster.shared: is missing",
        ("such as /fsx/smtrain", {"cluster.shared": "/fsx/smtrain"}),
    ),
    case(
        "slurm",
        {"checkpoint.s3_uri": "s3://bucket/c"},
        "on a cluster checkpoints lie below",
        "leave it out",
    ),
    *(
        case(
            "slurm",
            {f"compute.{name}": value},
            f"compute.{name}: applies to SageMaker only",
            "leave it out",
        )
        for name, value in {
            "spot": True,
            "keep_alive": 60,
            "fallback_regions": ["eu-north-1"],
            "training_plan": PLAN,
            "infra_check": True,
            "retries": 2,
            "instance_group": "g",
        }.items()
    ),
    case(
        "slurm", {"network.isolation": True}, "network: applies to SageMaker only", "leave it out"
    ),
    case(
        "gpu",
        {"output.s3_uri": "s3://My_Bucket/x"},
        "cannot be a bucket's name",
        ("lower-case letters", {"output.s3_uri": "s3://my-bucket/x"}),
    ),
    case(
        "gpu",
        {"model.path": "fsx://fs-0123456789abcdef0/m"},
        "cannot lie on a file system",
        ("give a folder", {"model.path": "@/model"}),
        ("or an s3:// URI", {"model.path": "s3://bucket/model"}),
    ),
    case(
        "gpu",
        {"data.path": "fsx://fs-0/x", "network": {"subnets": ["s"], "security_group_ids": ["g"]}},
        "must look like",
        ("fsx://fs-0123456789abcdef0/folder", {"data.path": "fsx://fs-0123456789abcdef0/folder"}),
    ),
    case(
        "gpu",
        {"tags": {"aws:x": "y"}},
        "are AWS's own",
        ("give it another name", {"tags": {"x": "y"}}),
    ),
    case(
        "gpu",
        {"compute.instance_type": "box"},
        "box is no instance type",
        ("take one, such as ml.p5.48xlarge", {"compute.instance_type": "ml.p5.48xlarge"}),
    ),
    case(
        "local",
        {"compute.instance_type": "box"},
        "box is no instance type",
        ("take one, such as ml.p5.48xlarge", {"compute.instance_type": "ml.p5.48xlarge"}),
        ("or describe box under machines", {"machines": {"box": BOX}}),
    ),
    case(
        "slurm",
        {"compute.instance_type": "box"},
        "box is no instance type",
        ("take one, such as ml.p5.48xlarge", {"compute.instance_type": "ml.p5.48xlarge"}),
        ("or describe box under machines", {"machines": {"box": BOX}}),
    ),
    case(
        "gpu",
        {"compute.instance_type": "ml.p7.48xlarge"},
        "ml.p7.48xlarge is no instance type that smtrain knows",
        ("take ml.p5.48xlarge", {"compute.instance_type": "ml.p5.48xlarge"}),
        ("or describe ml.p7.48xlarge under machines", {"machines": {"ml.p7.48xlarge": BOX}}),
    ),
    *(
        case(
            target,
            {key: value, "track.mlflow": MLFLOW},
            f"{key}: applies to SageMaker only",
            ("leave it out", {key: OUT}),
        )
        for target, key, value in (
            ("slurm", "track.managed", True),
            ("pai", "output.model_package_group", GROUP),
        )
    ),
    case(
        "gpu",
        {"compute.price": "spot"},
        "spot is not what machines cost with compute.spot: false",
        ("leave it out", {"compute.price": OUT}),
    ),
    case(
        "gpu",
        {"compute.price": "reserved", "compute.spot": True, "checkpoint.resume": True},
        "reserved is not what",
        ("leave it out", {"compute.price": OUT}),
    ),
    case(
        "gpu",
        {"track.managed": True},
        "SageMaker writes to its own MLflow only",
        ("set track.mlflow to the ARN of a tracking server or app", {"track.mlflow": MLFLOW}),
    ),
    case(
        "gpu",
        {"output.source_model_package": f"{GROUP.replace('-group', '')}/3"},
        "has no effect without output.model",
        ("set that too", {"output.model_package_group": GROUP}),
    ),
    case(
        "gpu",
        {"compute.cpu_instance_type": "ml.m5.5xlarge"},
        "ml.m5.5xlarge is no instance type",
        ("take ml.m5.xlarge", {"compute.cpu_instance_type": "ml.m5.xlarge"}),
        (
            "or describe ml.m5.5xlarge under machines",
            {"machines": {"ml.m5.5xlarge": {**BOX, "kind": "cpu"}}},
        ),
    ),
    case(
        "gpu",
        {"compute.instance_type": "ml.p2.16xlarge", "train.precision": "fp32"},
        "has K80 GPUs",
        ("take ml.g5.xlarge", {"compute.instance_type": "ml.g5.xlarge"}),
    ),
    case(
        "gpu",
        {
            "train.precision": "bf16",
            "compute.instance_type": "ml.p3.16xlarge",
            "compute.image": IMAGE12,
        },
        "V100 GPUs (ml.p3.16xlarge) have no bf16",
        ("set fp16", {"train.precision": "fp16"}),
        ("or fp32", {"train.precision": "fp32"}),
    ),
    case(
        "gpu",
        {
            "compute.instance_type": "ml.p3.16xlarge",
            "train.precision": "fp16",
            "compute.image": IMAGE13,
        },
        "this image has CUDA 13.0, without kernels for V100",
        ("name one with CUDA 12.9 or earlier", {"compute.image": IMAGE12}),
    ),
    case(
        "gpu",
        {"compute.image": "1.dkr.ecr.us-west-2.amazonaws.com/x:arm64"},
        "this image is for arm64",
        ("name one for x86_64", {"compute.image": IMAGE13}),
    ),
    case(
        "gpu",
        {"compute.instance_type": "ml.p6e-gb200.36xlarge", "compute.image": HF13},
        "this image is for x86_64",
        (
            "name one for arm64",
            {"compute.image": "123456789012.dkr.ecr.us-west-2.amazonaws.com/x:arm64"},
        ),
    ),
    case(
        "gpu",
        {"compute.instance_type": "box", "machines": {"box": BOX}},
        "AWS has no such type",
        ("name an instance type", {"compute.instance_type": "ml.p5.48xlarge"}),
        ("or run on box itself with target: local", {"target": "local"}),
    ),
    case(
        "slurm",
        {"compute.instance_type": OUT},
        "compute.instance_type: is missing, and a cluster has no default",
        ("set it to the type of the nodes, such as", {"compute.instance_type": "ml.p4d.24xlarge"}),
        (
            "or describe a node under machines and name that entry",
            {"compute.instance_type": "box", "machines": {"box": BOX}},
        ),
    ),
    case(
        "slurm",
        {
            "compute.instance_type": OUT,
            "machines": {"box": BOX},
            "parallel": {"tp": 64},
            "model.path": "hf://Qwen/Qwen3-8B",
        },
        "compute.instance_type: is missing;",
        (
            "set it to box, as under machines",
            {"compute.instance_type": "box", "parallel": {"tp": 4}},
        ),
    ),
    case(
        "pai",
        {"compute.instance_type": OUT, "machines": OUT},
        "compute.instance_type: is missing;",
        (
            "describe the GPUs of a pod under machines, and name that entry",
            {"compute.instance_type": "box", "machines": {"box": BOX}},
        ),
    ),
    case("slurm", {"cluster.time": 60}, "cluster.time: 60 s leaves no time", "420 s would do"),
    case(
        "slurm", {"compute.max_run": 60}, "compute.max_run: 60 s leaves no time", "420 s would do"
    ),
    case(
        "slurm",
        {"data.path": "fsx://fs-0123456789abcdef0/t"},
        "is how SageMaker names",
        ("give the path under which the nodes have mounted it", {"data.path": "@/text"}),
    ),
    case(
        "slurm",
        {"cluster.sbatch": ["--wrap=x"]},
        "cluster.sbatch: ",
        ("put lines of yours into cluster.setup", {"cluster.sbatch": OUT, "cluster.setup": ["x"]}),
    ),
    case(
        "slurm",
        {"cluster.setup": ["x=1", "export A=it's"]},
        "cluster.setup: bash cannot read it (unexpected EOF",
        ("correct the line", {"cluster.setup": ["x=1", 'export A="it\'s"']}),
    ),
    case(
        "trn2",
        {"parallel": {"tp": 8, "pp": 3}},
        "tp x pp = 24 does not divide",
        "tp = 4 and pp = 4 would do",
    ),
    case(
        "trn2",
        {"parallel": {"tp": 4, "dp": 3}},
        "tp x pp x dp = 12",
        "tp = 4, pp = 1 and dp = 16 would do",
    ),
    case(
        "trn2",
        {"parallel": {"tp": 8}, "train.global_batch_size": 64},
        "torus connects",
        ("set parallel: auto", {"parallel": "auto"}),
    ),
    *(
        case(
            "trn2",
            {"compute.instance_type": kind},
            "as SageMaker has no training job on it",
            "set compute.instance_type: ml.trn2.48xlarge",
        )
        for kind in ("ml.trn2u.48xlarge", "ml.trn2.3xlarge")
    ),
    case(
        "trn2",
        {"compute.instance_type": "ml.trn2.3xlarge", "parallel": {"tp": 2}},
        "as SageMaker has no training job on it",
        (
            "set compute.instance_type: ml.trn2.48xlarge and parallel: auto",
            {"compute.instance_type": "ml.trn2.48xlarge", "parallel": "auto"},
        ),
    ),
    *(
        case(base, {"compute.environment": environment}, says, "leave it out")
        for base, environment, says in (
            ("trn2", {LNC: "3"}, "takes 1 or 2"),
            ("trn1", {LNC: "2"}, "takes 1 only"),
            ("trn2", {LNC: "1", "NEURON_RT_VIRTUAL_CORE_SIZE": "2"}, "which means the same"),
        )
    ),
    case(
        "trn2",
        {"compute.environment": {"NEURON_CC_FLAGS": "--lnc=1 -O1"}},
        "compiles for LNC 1",
        ("leave --lnc=1 out of it", {"compute.environment": {"NEURON_CC_FLAGS": "-O1"}}),
    ),
    case(
        "trn2",
        {"compute.processes_per_instance": 128},
        "has 64 Neuron cores",
        ("set at most 64", {"compute.processes_per_instance": 64}),
        (f"or compute.environment.{LNC}: '1'", {"compute.environment": {LNC: "1"}}),
    ),
)

TRAIN = (
    case(
        "local",
        {"train.global_batch_size": 8, "train.max_global_batch_size": 4},
        "is above train.max_global_batch_size",
        ("leave one of the two", {"train.max_global_batch_size": OUT}),
        (" out", {"train.global_batch_size": OUT}),
    ),
    case(
        "local",
        {"train.warmup_steps": 9},
        "is more than train.steps",
        ("use at most that", {"train.warmup_steps": 4}),
    ),
    case("local", {"train.lr": 5.0}, "train.lr: 5 is above 1", ("lower it", {"train.lr": 1e-4})),
    case("local", {"train.min_lr": 1.0}, "is above train.lr", ("lower it", {"train.min_lr": 1e-5})),
    case(
        "local",
        {"train.betas": [1.0, 0.9]},
        "number 1 is 1.0",
        ("below 1", {"train.betas": [0.5, 0.9]}),
    ),
    case(
        "local",
        {"train.betas": [0.9, -1.0]},
        "number 2 is -1.0",
        ("at least 0", {"train.betas": [0.9, 0.0]}),
    ),
    case(
        "local",
        {"train.adapter": {}, "model.init": "scratch"},
        "train.adapter: needs trained weights",
        ("leave one of the two", {"train.adapter": OUT}),
        (" out", {"model.init": OUT}),
    ),
    case(
        "local",
        {"train.adapter": {"targets": []}},
        "names no layer",
        "leave it out for all linear layers",
    ),
    case("local", {"export.merge": True}, "export.merge: has no effect unless", "leave it out"),
    case(
        "local",
        {"export.merge_base": "original", "train.adapter": {}},
        "export.merge_base: has no effect unless",
        "leave it out",
    ),
    *(
        case(base, {key: value}, f"{key}: only engine nxd does this", "leave it out")
        for base in ("local", "gpu", "trn2")
        for key, value in {
            "parallel.zero1": False,
            "parallel.virtual_stages": 2,
            "train.stochastic_rounding": True,
            "compute.compile_ahead": True,
            "checkpoint.form": "xser",
            "checkpoint.asynchronous": True,
        }.items()
    ),
    *(
        case(base, change, says, "leave it out")
        for base in ("nxd", "trn1")
        for change, says in (
            ({"train.compile": True}, "train.compile: engine nxd's steps are"),
            ({"parallel.shard": "full"}, "parallel.shard: engine nxd divides only"),
            ({"checkpoint.format": "dcp"}, "checkpoint.format: engine nxd writes"),
            ({"train.deterministic": False}, "train.deterministic: engine nxd's graphs"),
            ({"train.profile": {}}, "train.profile: engine nxd's steps"),
            (
                {"train.adapter": {}, "checkpoint.form": "xser"},
                "checkpoint.form: adapters are saved",
            ),
            (
                {"train.stochastic_rounding": True},
                "train.stochastic_rounding: has no effect unless",
            ),
        )
    ),
    case(
        "trn1",
        {"compute.compile_ahead": True, "network.isolation": True},
        "compute.compile_ahead: keeps graphs in S3",
        ("set only", {"compute.compile_ahead": OUT}),
        (" one", {"network.isolation": OUT}),
    ),
    case(
        "nxd",
        {"parallel.tp": 1, "parallel.cp": 2},
        "parallel.cp: only engine native cuts",
        "leave it out",
    ),
    case(
        "nxd",
        {"train.precision": "bf16", "parallel.sequence_parallel": False},
        "gradients are silently wrong",
        "set it to true",
    ),
    case(
        "nxd",
        {"train.adapter": {"quantize": "nf4"}},
        "engine nxd keeps no base in 4 bits",
        "leave it out",
    ),
    case(
        "trn2",
        {"train.adapter": {"quantize": "nf4"}},
        "bitsandbytes has no kernels for the Neuron cores",
        ("leave it out", {"train.adapter": {}}),
        ("take a GPU", {"compute.instance_type": "ml.p5.48xlarge", "compute.image": OUT}),
    ),
    case(
        "local",
        {
            "parallel.shard": "full",
            "parallel.tp": 1,
            "compute.instance_count": 1,
            "train.adapter": {"quantize": "nf4"},
        },
        "parallel.shard: full does not cut a base in 4 bits",
        "set it to optimizer",
    ),
    case(
        "local",
        {"checkpoint.format": "dcp"},
        "checkpoint.format: dcp is written by the processes that share all weights",
        ("set parallel.shard to full", {"parallel.shard": "full"}),
        ("leave checkpoint.format out", {"checkpoint.format": OUT}),
    ),
    case(
        "local",
        {"checkpoint.format": "dcp", "parallel.shard": "full", "train.adapter": {}},
        "checkpoint.format: adapters are saved in smtrain's own format",
        "leave it out",
    ),
    case(
        "local",
        {"train.adapter": {"quantize": "nf4"}},
        "parallel.tp = 2 would cut a block of 64 weights of",
        ("take a smaller parallel.tp", {"parallel.tp": 1, "compute.instance_count": 1}),
    ),
    case(
        "nxd",
        {"train.adapter": {"dropout": 0.1}},
        "train.adapter.dropout: engine nxd",
        "set it to 0",
    ),
    case(
        "nxd",
        {"train.precision": "bf16", "parallel.zero1": False},
        "keeps the fp32 master weights",
        "set it to true",
    ),
    case(
        "trn1",
        {"parallel.tp": 4, "parallel.pp": 2},
        "NxD lays groups of 4 across a host",
        ("change tp", {"parallel.tp": 2}),
        (" pp ", {"parallel.pp": 1}),
        ("or compute.instance_count", {"compute.instance_count": 2}),
    ),
    case(
        "nxd",
        {"parallel.virtual_stages": 2, "parallel.tp": 1, "train.global_batch_size": 6},
        "the interleaved schedule",
        ("change train.global_batch_size", {"train.global_batch_size": 8}),
        (
            "or parallel.micro_batch_size",
            {"parallel.micro_batch_size": 1, "train.global_batch_size": 12},
        ),
    ),
    case(
        "nxd",
        {"parallel.virtual_stages": 2, "parallel.pp": 1},
        "parallel.virtual_stages: has no effect",
        "leave it out",
    ),
    case(
        "nxd",
        {
            "parallel.virtual_stages": 2,
            "train.global_batch_size": 8,
            "train.validation": {"fraction": 0.1},
        },
        "cannot evaluate interleaved stages",
        ("leave one of it", {"train.validation": OUT}),
        ("and parallel.virtual_stages out", {"parallel.virtual_stages": OUT}),
    ),
    case(
        "nxd",
        {"train.objective": "sft", "train.validation": {"fraction": 0.1, "samples": 2}},
        "engine nxd does not generate",
        ("leave it out", {"train.validation.samples": OUT}),
    ),
    *(
        case(
            base,
            {"parallel.pipeline_cuts": [0, 1]},
            "2 cuts for 2 stages",
            ("give 1", {"parallel.pipeline_cuts": [0]}),
            ("or none", {"parallel.pipeline_cuts": OUT}),
        )
        for base in ("local", "nxd")
    ),
    case(
        "local",
        {"train.batch_ramp": {"start": 8, "increment": 2, "samples": 100}},
        "train.batch_ramp.start: 8 is not below train.global_batch_size = 8",
        ("lower it", {"train.batch_ramp.start": 4}),
        ("leave train.batch_ramp out", {"train.batch_ramp": OUT}),
    ),
    case(
        "local",
        {"train.batch_ramp": {"start": 2, "increment": 4, "samples": 100}},
        "train.batch_ramp.increment: 4 does not divide the 6 sequences",
        ("take a number that does", {"train.batch_ramp.increment": 2}),
    ),
    case(
        "local",
        {
            "train.batch_ramp": {"start": 2, "increment": 1, "samples": 100},
            "parallel.micro_batch_size": 2,
        },
        "train.batch_ramp.increment: 1 is not a multiple of dp x micro_batch_size = 1 x 2",
        ("take a multiple", {"train.batch_ramp.increment": 2}),
    ),
    *(
        case("nxd", {key: value}, f"{key}: engine nxd", "leave it out")
        for key, value in (
            ("train.batch_ramp", {"start": 4, "increment": 2, "samples": 100}),
            ("train.param_norm", "all"),
        )
    ),
    *(
        case(
            base,
            {"parallel.layers_per_stage": [1, 2, 1]},
            "3 numbers for 2 stages",
            ("give 2", {"parallel.layers_per_stage": [1, 3]}),
            ("or none", {"parallel.layers_per_stage": OUT}),
        )
        for base in ("local", "nxd")
    ),
    case(
        "nxd",
        {
            "parallel.layers_per_stage": [1, 3],
            "parallel.virtual_stages": 2,
            "train.global_batch_size": 8,
        },
        "2 numbers for 4 stages",
        ("give 4", {"parallel.layers_per_stage": [1, 1, 1, 1]}),
        ("or none", {"parallel.layers_per_stage": OUT}),
    ),
    case(
        "local",
        {"parallel.layers_per_stage": [4, 0]},
        "every stage needs at least 1 layer",
        ("raise that number", {"parallel.layers_per_stage": [1, 3]}),
    ),
    case(
        "local",
        {"parallel.layers_per_stage": [1, 3], "parallel.pipeline_cuts": [0]},
        "both divide the layers",
        ("leave one of them", {"parallel.layers_per_stage": OUT}),
        (" out", {"parallel.pipeline_cuts": OUT}),
    ),
    case(
        "local",
        {"export.checkpoint": "best"},
        "export.checkpoint: best needs",
        (
            "set that in train.validation with a fraction such as 0.01",
            {"train.validation": {"keep_best": True, "fraction": 0.01}},
        ),
        ("leave export.checkpoint out", {"export.checkpoint": OUT}),
    ),
    case(
        "local",
        {"export.checkpoint": "best", "train.validation": {"fraction": 0.1}},
        "export.checkpoint: best needs",
        ("set it to true", {"train.validation.keep_best": True}),
        ("leave export.checkpoint out", {"export.checkpoint": OUT}),
    ),
    case(
        "nxd",
        {"export.checkpoint": "best", "train.validation": {"fraction": 0.1, "keep_best": True}},
        "is read from the checkpoints of engine native",
        ("leave it out", {"export.checkpoint": OUT}),
    ),
    case(
        "local",
        {"train.validation": {"fraction": 0.1, "path": "@/text"}},
        "both say what is held out",
        ("leave one of them", {"train.validation.path": OUT}),
        (" out", {"train.validation.fraction": OUT}),
    ),
    case(
        "local",
        {"train.validation": {"keep_best": True}},
        "does not say what is held out",
        ("set fraction (0.01", {"train.validation.fraction": 0.01}),
        ("or path", {"train.validation.path": "@/text"}),
    ),
    case(
        "local",
        both(
            prepared(validation={"prefix": "validation", "documents": 1, "tokens": 9}),
            {"train.validation": {"fraction": 0.1}},
        ),
        "is prepared already",
        ("leave fraction out", {"train.validation.fraction": OUT}),
    ),
    case(
        "local",
        both(prepared(), {"train.validation": {"fraction": 0.1}}),
        "is prepared already",
        (
            (
                "leave fraction out; if it has no held-out part (manifest.json says so), first"
                " prepare it again with --validation-fraction"
            ),
            both(
                {"train.validation.fraction": OUT},
                prepared(validation={"prefix": "validation", "documents": 1, "tokens": 9}),
            ),
        ),
        more=True,
    ),
    case(
        "local",
        {"train.validation": {"split": "980,10,10"}},
        "cuts Megatron's indexed data",
        ("use fraction", {"train.validation": {"fraction": 0.1}}),
        (
            "if it is that, set data.format: megatron",
            both(
                {"data.format": "megatron"},
                write("text/d.bin", b"ab"),
                write("text/d.idx", b"ab"),
                remove("text/a.jsonl"),
            ),
        ),
    ),
    case(
        "local",
        {"train.validation": {"fraction": 0.1, "keep_best": True, "interval": 3}},
        "every checkpoint needs",
        ("must be a multiple of", {"train.save_interval": 99}),
    ),
    case(
        "local",
        {"train.validation": {"fraction": 0.1, "samples": 2}},
        "answers held-out questions",
        ("leave it out", {"train.validation.samples": OUT}),
    ),
    case(
        "local",
        {"train.validation": {"path": "gs://x/y"}},
        "gs://x/y is not a path",
        ("a path", {"train.validation.path": "@/text"}),
        ("s3://", {"train.validation.path": "s3://bucket/v"}),
        ("demo://", {"train.validation.path": "demo://python-stdlib"}),
    ),
    case(
        "local",
        {"train.validation": {"path": "s3://bucket/*.jsonl"}},
        "has a wildcard",
        ("give that", {"train.validation.path": "s3://bucket"}),
    ),
    case(
        "local",
        {"train.validation": {"path": "@/nowhere"}},
        "does not exist",
        ("give a file", {"train.validation.path": "@/text/a.jsonl"}),
        ("a folder", {"train.validation.path": "@/text"}),
        ("a glob", {"train.validation.path": "@/text/*.jsonl"}),
        ("or an s3:// URI", {"train.validation.path": "s3://bucket/v"}),
    ),
    case(
        "local",
        {"train.validation": {"path": "s3:/bucket/v"}},
        "train.validation.path: ",
        ("s3://bucket/v here; give that", {"train.validation.path": "s3://bucket/v"}),
    ),
    case(
        "gpu",
        {"train.engine": "nxd"},
        "nxd is the engine of Trainium1",
        "set train.engine: native",
        "take ml.trn1.32xlarge",
    ),
    case(
        "trn2",
        {"train.engine": "nxd"},
        "nxd is the engine of Trainium1",
        "set train.engine: native",
        "take ml.trn1.32xlarge",
    ),
    case(
        "trn1",
        {"train.engine": "native"},
        "native does not run on",
        "set train.engine: nxd",
        "take ml.trn2.48xlarge",
    ),
    case(
        "nxd",
        {"train.precision": "fp16"},
        "engine nxd trains in bf16 or fp32",
        ("bf16", {"train.precision": "bf16"}),
        ("fp32; set one of them", {"train.precision": "fp32"}),
    ),
    case(
        "trn1",
        {"train.precision": "fp16"},
        "engine nxd trains in bf16 or fp32",
        ("bf16", {"train.precision": "bf16"}),
        ("fp32; set one of them", {"train.precision": "fp32"}),
    ),
    case(
        "trn2",
        {"train.precision": "fp16"},
        "computes in bf16",
        ("set bf16", {"train.precision": "bf16"}),
    ),
    case(
        "gpu",
        {"train.precision": "fp16", "compute.instance_type": "ml.m5.4xlarge"},
        "fp16 is for GPUs, and ml.m5",
        ("set bf16", {"train.precision": "bf16"}),
        ("or fp32", {"train.precision": "fp32"}),
    ),
    case(
        "slurm",
        {
            "train.precision": "fp16",
            "compute.instance_type": "box",
            "machines": {"box": {**BOX, "kind": "cpu"}},
        },
        "fp16 is for GPUs, and box",
        ("set bf16", {"train.precision": "bf16"}),
        ("or fp32", {"train.precision": "fp32"}),
    ),
)

SFT, DPO = {"train.objective": "sft"}, {"train.objective": "dpo"}
DATA = (
    case(
        "local",
        {"data.sources": [{"path": "@/text/a.jsonl"}]},
        "both are set",
        (
            "name the path among the sources",
            {"data.path": OUT, "data.sources": [{"path": "@/text/a.jsonl"}, {"path": "@/text"}]},
        ),
    ),
    case(
        "local",
        {"data": {"sources": [{"path": "@/text", "weight": 1}, {"path": "@/text/a.jsonl"}]}},
        "have a weight",
        (
            "give one to every source",
            {
                "data": {
                    "sources": [
                        {"path": "@/text", "weight": 1},
                        {"path": "@/text/a.jsonl", "weight": 2},
                    ]
                }
            },
        ),
        ("or to none", {"data": {"sources": [{"path": "@/text"}, {"path": "@/text/a.jsonl"}]}}),
    ),
    case(
        "gpu",
        {"data.machines": 2, "network.isolation": True},
        "keeps shares of the text in S3",
        ("set only", {"data.machines": OUT}),
        (" one", {"network.isolation": OUT}),
    ),
    case(
        "gpu",
        {"data.path": "hf://org/data", "network.isolation": True},
        "hf:// needs the network",
        ("give the files", {"data.path": "@/text"}),
        ("or allow it", {"network.isolation": OUT}),
    ),
    case(
        "gpu",
        {"data.decontaminate": {"path": "hf://org/data"}, "network.isolation": True},
        "data.decontaminate.path: hf:// needs the network",
        ("give the files", {"data.decontaminate": {"path": "@/text"}}),
        ("or allow it", {"network.isolation": OUT}),
    ),
    case(
        "local",
        {"data.decontaminate": {"path": "@/text/nothing"}},
        "data.decontaminate.path: ",
        ("give a file", {"data.decontaminate": {"path": "@/text/a.jsonl"}}),
        ("or an s3:// URI", {"data.decontaminate": {"path": "s3://bucket/v"}}),
    ),
    case(
        "local",
        {"data.language": {"keep": ["english"]}},
        "'english' is not a language's ISO 639 code",
        ("write it as in [en, de]", {"data.language": {"keep": ["en", "de"]}}),
    ),
    case(
        "local",
        {**SFT, "data.format": "text"},
        "has no answers to learn",
        ("use alpaca", {"data.format": "alpaca"}),
        ("or messages", {"data.format": "messages"}),
    ),
    *(
        case(
            "local",
            {"data.format": form},
            "is instruction data",
            "set train.objective: sft",
            ("or another format", {"data.format": "jsonl"}),
        )
        for form in ("alpaca", "messages")
    ),
    case(
        "local",
        {"model.chat_template_kwargs": {"enable_thinking": False}},
        "model.chat_template_kwargs: no conversation is written",
        ("leave it out", {"model.chat_template_kwargs": OUT}),
        ("set evaluate.chat_template", {"evaluate": {"tasks": ["boolq"], "chat_template": True}}),
    ),
    case(
        "local",
        {"model.chat_template_kwargs": {"tools": []}, **SFT},
        "tools: not an option of a chat template",
        (
            "name variables that it reads",
            {"model.chat_template_kwargs": {"enable_thinking": False}},
        ),
    ),
    case(
        "local",
        {"data.columns": {"output": "answer"}},
        "data.columns: is for train.objective: sft",
        (
            "leave it out and name the field of the text in data.text_column",
            {"data.columns": OUT, "data.text_column": "answer"},
        ),
    ),
    case(
        "local",
        {"data.overlong": "drop"},
        "data.overlong: is for train.objective: sft",
        "leave it out",
    ),
    *(
        case(
            "local",
            {**SFT, f"data.{key}": value},
            f"data.{key}: ",
            (
                f"leave {'them' if key in ('filters', 'near_duplicates') else 'it'} out for sft",
                {f"data.{key}": OUT},
            ),
        )
        for key, value in {
            "document_mask": True,
            "text_column": "body",
            "separator": "x",
            "unicode": "nfc",
            "strip_control": True,
            "min_characters": 3,
            "deduplicate": True,
            "filters": ["c4"],
            "near_duplicates": {},
            "pii": "mask",
            "fix_mojibake": True,
            "language": {"keep": ["en"]},
            "decontaminate": {"path": "@/text"},
        }.items()
    ),
    case(
        "local",
        {**DPO, "data.format": "text"},
        "has no pairs of answers",
        ("use jsonl", {"data.format": "jsonl"}),
    ),
    case(
        "local",
        {**SFT, "data.columns": {"chosen": "better"}},
        "are columns of preference data",
        ("name the question as instruction", {"data.columns": {"instruction": "prompt"}}),
        ("and the answer as output", {"data.columns": {"output": "better"}}),
    ),
    case(
        "local",
        {**DPO, "data.columns": {"output": "better"}},
        "are columns of one answer",
        (
            "name the answers as chosen and rejected",
            {"data.columns": {"chosen": "better", "rejected": "worse"}},
        ),
    ),
    case(
        "local",
        {**DPO, "data.deduplicate": True},
        "is for train.objective",
        ("leave it out for dpo", {"data.deduplicate": OUT}),
    ),
    case(
        "local",
        {"train.dpo.beta": 0.2},
        "train.dpo: has no effect with",
        ("set train.objective: dpo", {"train.objective": "dpo"}),
        ("or leave it out", {"train.dpo": OUT}),
    ),
    case(
        "local",
        {**DPO, "train.dpo.label_smoothing": 0.1},
        "only train.dpo.loss: robust",
        "set train.dpo.loss: robust",
        ("or leave it out", {"train.dpo": OUT}),
    ),
    case(
        "local",
        {**DPO, "model.init": "scratch"},
        "needs trained weights",
        ("name an instructed model in model.path and leave model.init out", {"model.init": OUT}),
    ),
    case(
        "trn1",
        {**DPO, "train.engine": "nxd"},
        "by engine native only",
        (
            "set train.engine: native",
            {"train.engine": "native", "compute.instance_type": "ml.trn2.48xlarge"},
        ),
    ),
    case(
        "local",
        {**DPO, "train.seq_len": 3},
        "cannot hold two answers",
        ("use at least 4", {"train.seq_len": 4}),
    ),
    case(
        "local",
        {**DPO, "train.dpo.reference": "@/nowhere"},
        "is not a folder",
        ("give one with weights", {"train.dpo.reference": "@/model"}),
        ("or an s3:// URI", {"train.dpo.reference": "s3://bucket/model"}),
    ),
    case(
        "local",
        both(
            {**DPO, "train.dpo.reference": "@/other"},
            write("other/config.json", {**LLAMA, "vocab_size": 1024}),
        ),
        "is another kind of model than model.path (vocab_size 1024 and 512)",
        ("name the model that this run starts from", {"train.dpo.reference": "@/model"}),
        "set train.dpo.reference: start",
    ),
    case(
        "local",
        both({**DPO, "train.dpo.reference": "@/other"}, write("other/a.txt", "")),
        "holds no config.json",
        ("give a Hugging Face model folder", {"train.dpo.reference": "@/model"}),
    ),
    case(
        "local",
        {**DPO, "train.dpo.reference": "hf://org/model"},
        "is not a folder or an s3:// URI",
    ),
    case(
        "local",
        {**SFT, "data": {"sources": [{"path": "@/text", "weight": 1}]}},
        "weights are for train.objective",
        ("leave them out for sft", {"data": {"sources": [{"path": "@/text"}]}}),
    ),
    *(
        case(
            "local",
            both(
                {"data.format": "megatron", f"data.{key}": value},
                write("text/d.bin", b"ab"),
                write("text/d.idx", b"ab"),
                remove("text/a.jsonl"),
            ),
            f"data.{key}: megatron is tokens",
            "leave it out",
            (
                "or give text",
                both(
                    {"data.format": OUT},
                    write("text/a.jsonl", '{"text": "a"}'),
                    remove("text/d.bin"),
                    remove("text/d.idx"),
                ),
            ),
        )
        for key, value in {
            "filters": ["c4"],
            "near_duplicates": {},
            "pii": "mask",
            "fix_mojibake": True,
            "language": {"keep": ["en"]},
            "decontaminate": {"path": "@/text"},
        }.items()
    ),
    case("local", {"data.phone_region": "US"}, "data.phone_region: has no effect", "leave it out"),
    case(
        "local",
        {"data.path": "s3://bucket/*.jsonl"},
        "has a wildcard",
        ("give the prefix", {"data.path": "s3://bucket"}),
    ),
    case(
        "local",
        {"data.path": "gs://x/y"},
        "gs://x/y is not a path",
        ("a path", {"data.path": "@/text"}),
        ("s3://", {"data.path": "s3://bucket/v"}),
        ("hf://", {"data.path": "hf://org/data"}),
        ("demo://", {"data.path": "demo://python-stdlib"}),
    ),
    case(
        "local",
        {"data.path": "@/nowhere"},
        "does not exist",
        ("give a file", {"data.path": "@/text/a.jsonl"}),
        ("a folder", {"data.path": "@/text"}),
        ("a glob", {"data.path": "@/text/*.jsonl"}),
        ("or an s3:// URI", {"data.path": "s3://bucket/v"}),
    ),
    case(
        "local",
        {"data": {"prepared": "gs://x/y"}},
        "data.prepared: gs://x/y is not",
        ("a folder", prepared()),
        ("or an s3:// URI", {"data.prepared": "s3://bucket/d"}),
    ),
    case(
        "local",
        {"data": {"prepared": "@/text"}},
        "holds no manifest.json",
        ("give a folder", prepared()),
        ("or its s3:// URI", {"data.prepared": "s3://bucket/d"}),
    ),
    case(
        "local",
        both(SFT, remove("model/chat_template.jinja")),
        "has no chat template",
        ("put a chat_template.jinja there", write("model/chat_template.jinja", "{{ messages }}")),
    ),
    case(
        "local",
        {"evaluate.tasks": ["loss_by_position"]},
        "evaluate.text: is missing",
        ("name some", {"evaluate.text": "@/text"}),
    ),
    case(
        "local", {"evaluate.lengths": [64, 128]}, "evaluate.lengths: only the tasks", "leave it out"
    ),
    case(
        "local",
        {"evaluate": {"tasks": ["needle"], "text": "gs://x/y"}},
        "evaluate.text: gs://x/y is not a file",
        ("give one with long documents", {"evaluate.text": "@/text"}),
    ),
    case(
        "local",
        {"evaluate": {"tasks": ["needle"], "text": "s3:/bucket/x"}},
        "evaluate.text: ",
        ("give that", {"evaluate.text": "s3://bucket/x"}),
    ),
    case(
        "local",
        {"evaluate.data": "@/nowhere"},
        "evaluate.data: ",
        (
            "give one of task YAMLs",
            both(write("tasks/t.yaml", "task: t\n"), {"evaluate.data": "@/tasks"}),
        ),
        (
            "or of a benchmark's files",
            both(write("mmlu/a/test-0.parquet", b"x"), {"evaluate.data": "@/mmlu"}),
        ),
    ),
    case(
        "local",
        {"evaluate.tasks": ["humaneval"]},
        "evaluate.tasks: humaneval run code that the model writes",
        ("turn evaluate.run_generated_code on", {"evaluate.run_generated_code": True}),
        ("or leave out such tasks", {"evaluate.tasks": ["boolq"]}),
    ),
    case(
        "local",
        {"evaluate": {"tasks": ["boolq", "agieval_lsat_ar"], "num_fewshot": 5}},
        "evaluate.num_fewshot: the harness has no worked examples for agieval_lsat_ar",
        ("leave it out", {"evaluate.num_fewshot": None}),
        ("or evaluate such tasks separately", {"evaluate.tasks": ["boolq"]}),
    ),
    case(
        "local",
        {"evaluate.data": "@/text"},
        "holds no task's .yaml",
        (
            "give the folder that does",
            both(write("tasks/t.yaml", "task: t\n"), {"evaluate.data": "@/tasks"}),
        ),
    ),
    case(
        "local",
        both(
            {"evaluate": {"data": "@/tasks", "tasks": ["t"]}},
            write("tasks/t.yaml", "task: t\ndataset_kwargs:\n  data_files: t.jsonl\n"),
        ),
        "which does not exist",
        ("put it there", write("tasks/t.jsonl", "{}")),
        (
            "or correct the task's data_files",
            both(
                write("tasks/u.jsonl", "{}"),
                write("tasks/t.yaml", "task: t\ndataset_kwargs:\n  data_files: u.jsonl\n"),
            ),
        ),
    ),
    # the text itself
    case(
        "local",
        both(remove("text/a.jsonl"), write("text/a.dat", "hello")),
        "holds no file of text that can be read",
        (
            "give a folder of text",
            both(write("more/a.jsonl", '{"text": "a"}'), {"data.path": "@/more"}),
        ),
        "set data.format: text",
    ),
    case(
        "local",
        write("text/a.jsonl", ""),
        "holds no file of text that can be read",
        (
            "give a folder of text",
            both(write("more/a.jsonl", '{"text": "a"}'), {"data.path": "@/more"}),
        ),
    ),
    case(
        "local",
        both(remove("text/a.jsonl"), write("text/a.pdf", b"\0\1\2")),
        "holds no file of text that can be read",
        (
            "give a folder of text",
            both(write("more/a.jsonl", '{"text": "a"}'), {"data.path": "@/more"}),
        ),
    ),
    case(
        "local",
        {"data.path": "/dev/null"},
        "is a device, a pipe or a socket, not a regular file",
        ("give a file, a folder or a glob", {"data.path": "@/text"}),
    ),
    case(
        "local",
        {"data.path": "@/text/*.parquet"},
        "no file matches",
        ("correct the pattern", {"data.path": "@/text/*.jsonl"}),
    ),
    case(
        "local",
        both(write("text/d.bin", b"ab"), {"data.path": "@/text/d.bin", "data.format": "megatron"}),
        "is half of an indexed",
        ("copy that there too", write("text/d.idx", b"ab")),
    ),
    case(
        "local",
        both(write("text/a.jsonl", ""), {"data.path": "@/text/a.jsonl"}),
        "is empty",
        ("give a file with text", write("text/a.jsonl", '{"text": "a"}')),
    ),
    case(
        "local",
        both(write("text/a.txt", "caf\xe9 ".encode("latin-1") * 40), {"data.path": "@/text/a.txt"}),
        "is not text in UTF-8",
        ("set data.encoding to iso-8859-1", {"data.encoding": "iso-8859-1"}),
        ("or convert it", write("text/a.txt", "caf\xe9")),
    ),
    case(
        "local",
        both(write("text/a.jsonl.gz", '{"text": "a"}'), remove("text/a.jsonl")),
        "is not compressed by gzip",
        ("if it is plain, name it a.jsonl", rename("text/a.jsonl.gz", "text/a.jsonl")),
        ("else write it again", write("text/a.jsonl.gz", gzip.compress(b'{"text": "a"}'))),
    ),
    case(
        "local",
        both(write("text/a.jsonl.zst", gzip.compress(b'{"text": "a"}')), remove("text/a.jsonl")),
        "is compressed by gzip, not by zstd",
        ("name it a.jsonl.gz", rename("text/a.jsonl.zst", "text/a.jsonl.gz")),
    ),
    case(
        "local",
        both(write("text/a.jsonl.gz", bytes(40)), remove("text/a.jsonl")),
        "begins with zero bytes",
        ("copy the original again", write("text/a.jsonl.gz", gzip.compress(b'{"text": "a"}'))),
    ),
    case(
        "local",
        both(
            write("text/a.jsonl.zst", b"\x28\xb5\x2f\xfd\x04\xa8\x85\x17\x00"),
            remove("text/a.jsonl"),
        ),
        "is compressed with a window of 2,048 MiB",
        (
            "write it again without --long",
            write(
                "text/a.jsonl.zst",
                b"\x28\xb5\x2f\xfd\x04\x58" + bytes.fromhex("69 00 00") + b'{"text": "a"}',
            ),
        ),
    ),
    *(
        case("local", prepared(**change), says, (way, prepared()))
        for change, says, way in (
            (
                {"format_version": 99},
                "is not a dataset that this smtrain reads",
                "prepare it again",
            ),
            (
                {"objective": "sft"},
                "was prepared for train.objective: sft",
                "prepare the text again",
            ),
            ({"seq_len": 64}, "was prepared for sequences of 64", "prepare the text again"),
            ({"samples": 0}, "does not hold one whole sample", "prepare the text again"),
            (
                {"documents": "many"},
                "manifest.json is damaged (documents: ",
                "prepare the text again",
            ),
            ({"vocab_size": 1024}, "has token ids up to 1023", "prepare the text again"),
            (
                {"model_vocab_size": 600, "tokenizer_sha256": "0" * 64},
                "was prepared for a model of vocab_size 600 with another tokenizer",
                "prepare the text again",
            ),
            (
                {"tokenizer_sha256": "0" * 64},
                "another tokenizer than the model's",
                "prepare the text again",
            ),
            ({"files": {"tokens.bin": {"bytes": 5}}}, "has 4 bytes, not 5", "copy it again"),
        )
    ),
    case(
        "local",
        both(prepared(), {"train.validation": {"keep_best": True}}),
        "was prepared without a held-out part",
        (
            "prepare the text again",
            prepared(validation={"prefix": "validation", "documents": 1, "tokens": 9}),
        ),
        ("or leave train.validation out", {"train.validation": OUT}),
    ),
)

CONVERTED = both({"model.weights": OUT}, {"model.path": "@/model"})
MODEL = (
    case(
        "local",
        {"model.weights": "s3://bucket/w", "model.init": "scratch"},
        "model.weights: has no effect with",
        ("set only", {"model.weights": OUT}),
        (" one", {"model.init": OUT}),
    ),
    case(
        "local",
        {"model.weights": "s3://bucket/w", "train.adapter": {}},
        "an adapter alone needs a base",
        "set export.merge: true",
        ("or convert the weights", CONVERTED),
    ),
    case(
        "local",
        {"model.weights": "s3://bucket/w", "evaluate.tasks": ["t"], "evaluate.base": True},
        "the base model is evaluated",
        "set evaluate.base: false",
        ("or convert the weights", CONVERTED),
    ),
    case(
        "local",
        {"model.path": "hf://x"},
        "must look like hf://organization/model@revision",
        ("hf://organization/model@revision", {"model.path": "hf://organization/model"}),
    ),
    case(
        "local",
        {"model.path": "hf://a/b", "model.token": {"secret": "a", "ssm": "b"}},
        "model.token: must name one of",
        ("secret", {"model.token.ssm": OUT}),
        ("ssm", {"model.token.secret": OUT}),
    ),
    case(
        "local",
        {"model.token": {"secret": "a"}},
        "model.token: has no effect unless",
        "leave it out",
    ),
    case(
        "local",
        {"model.path": "modelscope://a/b", "data.path": "hf://a/c", "model.token": {"secret": "a"}},
        "is the token of one hub",
        ("use a model", {"model.path": "s3://bucket/model"}),
        ("or text in S3", {"data.path": "s3://bucket/text"}),
    ),
    case(
        "gpu",
        {"model.path": "hf://a/b", "network.isolation": True},
        "keeps the fetch stage from the hub",
        ("give its s3://", {"model.path": "s3://bucket/model"}),
    ),
    case(
        "local",
        {"export.megatron": True, "train.adapter": {}},
        "Megatron has no form for an adapter",
        "set export.merge: true",
    ),
    case(
        "local",
        {"model.weights": "gs://x/y"},
        "model.weights: gs://x/y is not a folder",
        ("a folder", {"model.weights": "@/model"}),
        ("or an s3:// URI", {"model.weights": "s3://bucket/w"}),
    ),
    case(
        "local",
        {"model.weights": "s3://bucket/out/model.tar.gz"},
        "model.weights: s3://bucket/out/model.tar.gz is an archive",
        ("unpack it, as with `tar -xf`, and name the folder", {"model.weights": "@/model"}),
    ),
    case(
        "local",
        both(
            write("packed/model.tar.gz", b"\x1f\x8b\x08"),
            {"model.weights": "@/packed/model.tar.gz"},
        ),
        "model.tar.gz is a file, and it is an archive",
        ("give the folder with weights", {"model.weights": "@/model"}),
    ),
    case(
        "local",
        {"model.path": "s3://bucket/out/model.tar.gz"},
        "model.path: s3://bucket/out/model.tar.gz is an archive",
        ("unpack it, as with `tar -xf`, and name the folder", {"model.path": "@/model"}),
    ),
    case(
        "local",
        both(
            write("packed/model.tar.gz", b"\x1f\x8b\x08"), {"model.path": "@/packed/model.tar.gz"}
        ),
        "model.tar.gz is a file, and it is an archive",
        ("give a Hugging Face model folder", {"model.path": "@/model"}),
    ),
    case(
        "local",
        both(write("packed/model.tar.gz", b"\x1f\x8b\x08"), {"model.path": "@/packed"}),
        "packed holds an archive (model.tar.gz) and no config.json",
        ("unpack it, as with `tar -xf`, and name the folder", {"model.path": "@/model"}),
    ),
    case(
        "local",
        {"model.weights": "@/nowhere"},
        "nowhere is not a folder",
        ("give one with weights", {"model.weights": "@/model"}),
        ("or an s3:// URI", {"model.weights": "s3://bucket/w"}),
    ),
    case(
        "gpu",
        {"model.path": "hf://meta-llama/Llama-3.2-1B"},
        "is missing, and hf://meta-llama",
        ("must be named in model.token", {"model.token": {"secret": "hub"}}),
        (
            (
                "copy the model here, `hf download meta-llama/Llama-3.2-1B --local-dir FOLDER` with"
                " a token of yours, and give that folder"
            ),
            {"model.path": "@/model"},
        ),
    ),
    case(
        "gpu",
        {"data.path": "hf://bigcode/the-stack"},
        "is missing, and hf://bigcode",
        ("must be named in model.token", {"model.token": {"secret": "hub"}}),
    ),
    case(
        "local",
        {"model.path": "hf://EleutherAI/pythia-1.4b", "train.seq_len": 4096},
        "is beyond the 2048 positions of",
        ("use at most that", {"train.seq_len": 2048}),
    ),
    case(
        "local",
        {"model.path": "gs://x/y"},
        "gs://x/y is not a folder",
        ("a folder", {"model.path": "@/model"}),
        ("s3://", {"model.path": "s3://bucket/m"}),
        ("hf://", {"model.path": "hf://a/b"}),
        ("modelscope://", {"model.path": "modelscope://a/b"}),
        ("demo://", {"model.path": "demo://tiny-llama"}),
    ),
    case(
        "local",
        {"model.path": "jumpstart://a b"},
        "must look like jumpstart://MODEL_ID",
        ("jumpstart://MODEL_ID@VERSION", {"model.path": "@/model"}),
    ),
    case(
        "slurm",
        {"model.path": "jumpstart://meta-textgeneration-llama-3-8b"},
        "is in a bucket of AWS, which target slurm does not read",
        ("give the same model of the hub", {"model.path": "hf://organization/model"}),
        more=True,
    ),
    case(
        "local",
        {"model.path": "run://a/b"},
        "must look like run://NAME",
        ("the name of an earlier run", {"model.path": "@/model"}),
    ),
    case(
        "local",
        {"name": "one", "model.path": "run://one"},
        "is this run itself",
        ("name the earlier run", {"model.path": "@/model"}),
        ("give this one another name", {"name": "two", "model.path": "@/model"}),
    ),
    case(
        "local",
        {"model.path": "@/none"},
        "none is not a folder",
        ("give a Hugging Face model folder", {"model.path": "@/model"}),
        ("or s3:// URI", {"model.path": "s3://bucket/m"}),
    ),
    case(
        "local",
        {"model.path": "no/Llama-3.2-1B"},
        "(a model of the hub is",
        ("give a Hugging Face model folder", {"model.path": "@/model"}),
        ("hf://no/Llama-3.2-1B", {"model.path": "hf://no/Llama-3.2-1B"}),
    ),
    case(
        "local",
        remove("model/config.json"),
        "without its config.json",
        ("copy config.json of the same model next to it", write("model/config.json", LLAMA)),
    ),
    case(
        "local",
        both(remove("model/config.json"), remove("model/model.safetensors")),
        "holds no config.json",
        (
            "give a Hugging Face model folder",
            both(
                write("other/config.json", LLAMA),
                write("other/model.safetensors", WEIGHTS),
                write("other/tokenizer.json", "{}"),
                {"model.path": "@/other"},
            ),
        ),
    ),
    case(
        "local",
        write("model/config.json", "{"),
        "config.json cannot be read",
        ("mend it there", write("model/config.json", LLAMA)),
        ("or copy this one file again", write("model/config.json", LLAMA)),
    ),
    case(
        "local",
        write("model/config.json", "[1]"),
        "is a list, not a mapping",
        ("copy this one file again", write("model/config.json", LLAMA)),
    ),
    case(
        "local",
        shape(pad_token_id=600),
        "pad_token_id is 600",
        ("correct pad_token_id", shape(pad_token_id=3)),
        ("or set it to null", shape(pad_token_id=None)),
    ),
    case(
        "local",
        both(write("model/config.json", NEOX), {"export.megatron": True}),
        "Megatron-core has no parallel residual",
        "leave it out",
    ),
    case(
        "local",
        both(shape(model_type="olmo2"), {"export.megatron": True}),
        "olmo2 models have no form of Megatron, whose library has no norms behind attention",
        "leave it out",
    ),
    case(
        "local",
        both(shape(**LATENT, attention_bias=True), {"export.megatron": True}),
        "Megatron-core's latent attention has no biases (attention_bias)",
        "leave it out",
    ),
    case(
        "local",
        both(shape(**LATENT, norm_topk_prob=False), {"export.megatron": True}),
        "Megatron-core's router has no norm_topk_prob false with 2 experts of a token",
        "leave it out",
    ),
    case(
        "local",
        both(shape(**LATENT | {"n_group": 2, "num_experts_per_tok": 4}), {"export.megatron": True}),
        "Megatron-core would choose among groups by 4 experts of each",
        "leave it out",
    ),
    case(
        "local",
        both(write("model/config.json", WHOLE), remove("model/model.safetensors")),
        "multimodal model (seer) and no weights",
        (
            "give the whole folder",
            both(write("model/config.json", WHOLE), write("model/model.safetensors", WEIGHTS)),
        ),
        (
            "or the text model's own config.json",
            both(write("model/config.json", LLAMA), {"model.init": "scratch"}),
        ),
    ),
    case(
        "local",
        both(write("model/config.json", WHOLE), {"train.adapter": {"rank": 4}}),
        "peft would not find the layers of the text part",
        ("set export.merge: true", {"export.merge": True}),
    ),
    case(
        "local",
        {"train.seq_len": 512},
        "is beyond the model's 256 positions",
        ("use at most that", {"train.seq_len": 256}),
        (
            "or set model.rope: {type: yarn, factor: 2}",
            {"model.rope": {"type": "yarn", "factor": 2}},
        ),
    ),
    case(
        "local",
        both(
            shape(rope_theta=1e4, rope_scaling={"rope_type": "linear", "factor": 2.0}),
            {"train.seq_len": 512},
        ),
        "is beyond the model's 256 positions",
        ("use at most that", {"train.seq_len": 256}),
        (
            "or set model.rope: {type: linear, factor: 4, original_max_position_embeddings: 128}",
            {
                "model.rope": {
                    "type": "linear",
                    "factor": 4,
                    "original_max_position_embeddings": 128,
                }
            },
        ),
    ),
    case(
        "local",
        {"generate.max_new_tokens": 256},
        "256 and a prompt are beyond the model's 256 positions",
        ("set at most 255", {"generate.max_new_tokens": 255}),
    ),
    case(
        "local",
        {"train.seq_len": 2000, "model.rope": YARN},
        "is beyond the model's 1024 positions with model.rope",
        ("use at most that", {"train.seq_len": 1024}),
        ("or set model.rope: {type: yarn, factor: 8}", {"model.rope.factor": 8}),
    ),
    case(
        "local", {"model.rope": {}}, "model.rope: is empty", ("leave it out", {"model.rope": OUT})
    ),
    case("local", {"model.rope": {"factor": 4}}, "model.rope.type: is missing", "set it to yarn"),
    case(
        "local",
        {"model.rope": {"type": "linear"}},
        "model.rope.factor: is missing",
        ("give the new longest sequence divided by that of the model", {"model.rope.factor": 2}),
    ),
    case(
        "local",
        {"model.rope": {**YARN, "type": "linear", "truncate": False}},
        "no effect with type",
        "leave it out",
    ),
    case(
        "local",
        {"model.rope": {**YARN, "beta_fast": 0.5}},
        "must be above beta_slow",
        ("raise it", {"model.rope.beta_fast": 16}),
    ),
    case(
        "local",
        {"model.rope": {"type": "yarn", "factor": 2.3}},
        "no whole number",
        "set model.rope.factor: 3",
    ),
    case(
        "local",
        both(
            shape(rope_theta=1e4, rope_scaling={"rope_type": "linear", "factor": 2.0}),
            {"model.rope": YARN},
        ),
        "are of type linear already",
        (
            "add model.rope.original_max_position_embeddings",
            {"model.rope.original_max_position_embeddings": 128},
        ),
        ("or leave it out", {"model.rope": OUT}),
    ),
    case(
        "local",
        both(write("model/config.json", GPT2), {"model.rope": YARN}),
        "has learned its 256 positions one by one",
        ("leave it out", {"model.rope": OUT}),
    ),
    case(
        "local",
        both(shape(model_type="phi3", rope_theta=1e4), {"model.rope": YARN}),
        "takes no rotary embeddings of type yarn",
        ("give theta only", {"model.rope": {"theta": 1e6}}),
        ("leave model.rope out", {"model.rope": OUT}),
        more=True,
    ),
    case(
        "local",
        {"model.rope": YARN, "train.adapter": {"rank": 4}},
        "model.rope: peft would load",
        "set export.merge: true",
    ),
    case(
        "local",
        {"model.rope": {"type": "linear", "factor": 1.5}, "export.megatron": True},
        "no rotary embeddings of type linear with a fractional factor",
        "leave it out",
    ),
    case(
        "local",
        both(write("model/config.json", GPT2), {"train.seq_len": 512}),
        "which it has learned one by one",
        ("use at most that", {"train.seq_len": 256}),
    ),
    case(
        "nxd",
        both(write("model/config.json", GPT2), {"parallel.tp": 1}),
        "trains no gpt2 models",
        "set train.engine: native",
    ),
    *(
        case(
            "trn1",
            both(write("model/config.json", GPT2), change),
            "trains no gpt2 models",
            (
                "set train.engine: native and take ml.p5.48xlarge",
                {"train.engine": "native", "compute.instance_type": "ml.p5.48xlarge"},
            ),
            (
                "or ml.trn2.48xlarge",
                {"train.engine": "native", "compute.instance_type": "ml.trn2.48xlarge"},
            ),
        )
        for change in ({}, {"train.engine": "nxd"})
    ),
    case(
        "local",
        remove("model/tokenizer.json"),
        "holds no tokenizer.json",
        ("save the tokenizer there", write("model/tokenizer.json", "{}")),
        ("or set data.prepared", both({"data.path": OUT}, prepared())),
    ),
    case(
        "local",
        remove("model/model.safetensors"),
        "holds no model.safetensors",
        ("save the weights as safetensors", write("model/model.safetensors", WEIGHTS)),
        "set model.init: scratch",
    ),
    case(
        "local",
        both(rename("model/model.safetensors", "model/model-00001-of-00002.safetensors")),
        "lacks 1 of its 2 files",
        ("copy those files into it", write("model/model-00002-of-00002.safetensors", WEIGHTS)),
    ),
    case(
        "local",
        shape(quantization_config={"quant_method": "gptq"}),
        "the weights are quantized",
        ("take quantization_config out", shape(quantization_config=OUT)),
    ),
    case(
        "local",
        {"train.adapter": {"targets": ["c_attn"]}},
        "train.adapter.targets",
        ("take all-linear", {"train.adapter.targets": "all-linear"}),
        ("or some of q_proj", {"train.adapter.targets": ["q_proj"]}),
    ),
    case(
        "gpu",
        both(
            write("model/config.json", QWEN35),
            {"parallel.pp": 2, "train.adapter": {"targets": ["q_proj"]}},
        ),
        "layers 0 to 1, a stage of parallel.pp = 2, have no q_proj",
        ("take all-linear", {"train.adapter.targets": "all-linear"}),
    ),
    *(
        case(
            base,
            {"parallel.layers_per_stage": [2, 3]},
            "adds up to 5 layers, and the model has 4",
            ("correct it", {"parallel.layers_per_stage": [1, 3]}),
            ("leave it out", {"parallel.layers_per_stage": OUT}),
        )
        for base in ("local", "nxd")
    ),
    case(
        "local",
        {"parallel.pipeline_cuts": [3]},
        "must be rising layer numbers from 0 to 2",
        ("correct it", {"parallel.pipeline_cuts": [2]}),
        ("leave it out", {"parallel.pipeline_cuts": OUT}),
    ),
    case(
        "local",
        {"parallel.pp": 1, "parallel.ep": 2},
        "parallel.ep: a llama model has no experts to divide",
        "set it to 1",
    ),
    case(
        "local",
        both(
            write("model/config.json", {**MIXTRAL, "num_local_experts": 3}),
            {"parallel.pp": 1, "parallel.ep": 2},
        ),
        "parallel.ep = 2 does not divide the 3 experts of the model's layers",
        "ep = 1 would do",
    ),
    case(  # heads, units of the experts, and experts at once
        "local",
        both(
            write(
                "model/config.json", {**MIXTRAL, "num_local_experts": 3, "intermediate_size": 33}
            ),
            {"parallel": {"tp": 2, "pp": 1, "dp": 2, "ep": 2}},
        ),
        "parallel.tp = 2 does not divide the 33 units",
        "tp = 1, ep = 1 and dp = 4 would do",
        more=True,
    ),
    case(
        "gpu",
        both(
            write("model/config.json", {**MIXTRAL, "num_local_experts": 6}),
            {"parallel": {"ep": 8}, "train.global_batch_size": 8},
        ),
        "parallel.ep = 8 does not divide the 6 experts",
        "ep = 2 would do",
    ),
    case(  # a batch that only few meshes divide
        "gpu",
        both(
            shape(num_attention_heads=4, num_key_value_heads=4),
            {"parallel": {"tp": 8}, "train.global_batch_size": 1},
        ),
        "parallel.tp = 8 does not divide the model's 4 attention heads",
        "tp = 4 and pp = 2 would do",
        more=True,
    ),
    case(
        "gpu",
        both(
            shape(num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1),
            {"parallel": {"tp": 8}, "train.global_batch_size": 1},
        ),
        "parallel.tp = 8 does not divide the model's 1 attention heads",
        "tp = 1 and train.global_batch_size = 8 would do",
    ),
    case(
        "local",
        shape(num_hidden_layers=1),
        "parallel.pp = 2 is more than the model's 1 layers",
        "pp = 1 would do",
    ),
    case(
        "local",
        both(
            write("model/config.json", MIXTRAL),
            {"parallel.pp": 1, "parallel.cp": 2, "parallel.expert_capacity": 1.5},
        ),
        "parallel.expert_capacity: counts the tokens of whole sequences",
        ("leave one of the two", {"parallel.expert_capacity": OUT}),
        (" out", {"parallel.cp": OUT}),
    ),
    case(
        "local",
        write("model/config.json", {**MIXTRAL, "intermediate_size": 33}),
        "parallel.tp = 2 does not divide the 33 units of the model's experts",
        "tp = 1 would do",
    ),
    case(
        "local",
        write("model/config.json", {**QWEN2_MOE, "shared_expert_intermediate_size": 33}),
        "parallel.tp = 2 does not divide the 33 units of the expert that all tokens share",
        "tp = 1 would do",
    ),
    *(
        case("local", change, "a llama model has no experts", "leave it out")
        for change in (
            {"parallel.expert_capacity": 1.5},
            {"train.aux_loss": 0.1},
            {"train.aux_by_layer": True},
            {"train.router_bias_update_rate": 0.001},
        )
    ),
    case(
        "local",
        both(write("model/config.json", MIXTRAL), {"train.router_bias_update_rate": 0.001}),
        "train.router_bias_update_rate: routers of a mixtral model have no such biases",
        ("leave it out", {"train.router_bias_update_rate": OUT}),
    ),
    case(
        "local",
        both(
            write("model/config.json", MIXTRAL),
            {"train.adapter": {}, "train.router_bias_update_rate": 0.001},
        ),
        "train.router_bias_update_rate: adapters leave the model's routers as they are",
        ("leave it out", {"train.router_bias_update_rate": OUT}),
    ),
    case(
        "local",
        both(
            write("model/config.json", MIXTRAL), {"train.adapter": {}, "train.aux_by_layer": True}
        ),
        "train.aux_by_layer: adapters without experts have no auxiliary loss",
        ("leave it out", {"train.aux_by_layer": False}),
        ("or set train.aux_loss", {"train.aux_loss": 0.01}),
    ),
    case(
        "local",
        both(
            write("model/config.json", MIXTRAL),
            {"train.adapter": {"targets": ["q_proj", "w1", "w2"]}},
        ),
        "train.adapter.targets: w1 of experts needs w3 too",
        ("name both", {"train.adapter.targets": ["q_proj", "w1", "w3", "w2"]}),
    ),
    case(
        "local",
        both(
            write("model/config.json", MIXTRAL),
            {"train.adapter": {"targets": ["gate_up_proj", "w2"]}},
        ),
        "as matrices of all (experts.gate_up_proj) and as linears of each (w2)",
        ("leave out the linears", {"train.adapter.targets": ["gate_up_proj"]}),
    ),
    case(
        "local",
        both(write("model/config.json", MIXTRAL), {"train.adapter": {"targets": ["gate"]}}),
        "'gate' matches no linear layer of a mixtral model",
        ("take all-linear", {"train.adapter.targets": "all-linear"}),
        (
            "for experts experts.gate_up_proj",
            {"train.adapter.targets": ["mlp.experts.gate_up_proj", "down_proj"]},
        ),
        ("or w1, w3, w2", {"train.adapter.targets": ["all-linear", "w1", "w3", "w2"]}),
    ),
    case(
        "local",
        {"tags": {"a": "hf_" + "a" * 34}},
        "looks like a secret",
        ("keep it in Secrets Manager", {"tags": OUT}),
    ),
)

AWS = {"role": "arn:aws:iam::123456789012:role/training", "region": "us-east-1"}
FALLBACK = {"compute.fallback_instance_types": ["ml.g5.12xlarge"]}
PLANNER = (
    case(
        "trn1",
        {"model.path": "s3://models/llama-2-13b", "compute.instance_type": "ml.p5.4xlarge"},
        "no mesh of 1 x",
        "set compute.instance_count: 4",
        ("take larger instances", {"compute.instance_type": "ml.p5.48xlarge"}),
        ("with LoRA of rank 16 it fits", {"train.adapter": {"rank": 16}}),
    ),
    case(
        "trn1",
        {"train.global_batch_size": 7, "compute.instance_count": 4},
        "and divides train.global_batch_size",
        "set train.global_batch_size: 8",
        ("take larger instances", {"compute": {**AWS, "instance_type": "ml.p5.4xlarge"}}),
    ),
    case(
        "trn1",
        {"train.max_global_batch_size": 3, "compute.instance_count": 4},
        "with a global batch of at most 3",
        "set train.max_global_batch_size: 8",
        ("take larger instances", {"compute": {**AWS, "instance_type": "ml.p5.4xlarge"}}),
    ),
    case(
        "trn1",
        {"train.tokens": 1000, "train.steps": 3},
        "stands in place of train.steps",
        ("leave one of the two", {"train.tokens": OUT}),
        (" out", {"train.steps": OUT}),
    ),
    case(
        "local",
        {"train": {"tokens": 10**14, "seq_len": 32}},
        "take",
        ("lower it", {"train.tokens": 10**9}),
        ("or raise train.global_batch_size", {"train.global_batch_size": 10**6}),
    ),
    case(
        "trn1",
        {"parallel": "auto", "train.global_batch_size": 7, "compute.instance_count": 4},
        "parallel: auto finds no",
        "set train.global_batch_size: 8",
        ("take larger instances", {"compute": {**AWS, "instance_type": "ml.p5.4xlarge"}}),
    ),
    case(
        "local",
        {"parallel": {"tp": 1, "pp": 1}, "train.max_global_batch_size": 2},
        "and this mesh takes 4 sequences",
        ("raise it", {"train.max_global_batch_size": 4}),
        ("or take fewer machines", {"compute.instance_count": 1}),
        ("or more tp", {"parallel.tp": 2}),
        ("or pp", {"parallel.pp": 2}),
    ),
    case(
        "gpu",
        {"compute.fallback_instance_types": ["ml.p5e.48xlarge", "ml.p5e.48xlarge"]},
        "is named twice",
        ("leave it out", {"compute.fallback_instance_types": ["ml.p5e.48xlarge"]}),
    ),
    *(
        case(
            "gpu",
            {"compute.fallback_instance_types": [kind]},
            f"{kind} cannot take this job",
            ("leave it out", {"compute.fallback_instance_types": OUT}),
        )
        for kind in ("ml.trn1.32xlarge", "ml.p99.48xlarge")
    ),
    *(
        case(
            "gpu",
            {"parallel": {"tp": 2}, "train.global_batch_size": 12, **FALLBACK, **own},
            says,
            ("leave it out", {"compute.fallback_instance_types": OUT}),
        )
        for own, says in (
            (
                {"compute.processes_per_instance": 8},
                "compute.processes_per_instance is 8, and it has 4 cores",
            ),
            (
                {"model.path": "s3://bucket/m", "parallel": {"tp": 2, "dp": 4}},
                "tp x pp x dp = 8 is not its 4 processes",
            ),
            (
                {
                    "model.path": "s3://bucket/m",
                    "compute.fallback_instance_types": ["ml.trn2.48xlarge"],
                },
                "train.global_batch_size is no multiple of",
            ),
        )
    ),
)

LNC, OLD_LNC = (
    f"compute.environment.{name}"
    for name in ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
)
TRAINIUM = (
    case(
        "trn2",
        {"parallel": {"tp": 2, "pp": 2}, "train.global_batch_size": 64},
        "a pipeline group would be chips 0, 8 of ml.trn2.48xlarge",
        ("set parallel: auto, which gives tp 1 x pp 1 x dp 64", {"parallel": "auto"}),
    ),
    case(
        "trn2",
        {"parallel": {"tp": 2, "pp": 2}, "train.global_batch_size": 24},
        "a pipeline group would be chips 0, 8 of ml.trn2.48xlarge",
        ("set parallel: auto", {"parallel": "auto"}),
        more=True,
    ),
    case(
        "trn2",
        {
            "parallel": {"tp": 2, "pp": 2},
            "train.global_batch_size": 64,
            "model.path": "s3://bucket/unknown",
        },
        "a pipeline group would be chips 0, 8 of ml.trn2.48xlarge",
        ("set parallel.tp: 1, parallel.pp: 4", {"parallel": {"tp": 1, "pp": 4}}),
    ),
    case(
        "trn2",
        {"parallel": {"tp": 2, "dp": 8}, "train.global_batch_size": 64},
        "parallel.dp: tp x pp x dp = 16, but",
        ("tp = 2, pp = 1 and dp = 32 would do", {"parallel": {"tp": 2, "pp": 1, "dp": 32}}),
    ),
    case(
        "trn2",
        {"parallel": {"tp": 6}, "train.global_batch_size": 64},
        "does not divide the number of processes",
        ("tp = 2 and pp = 4 would do", {"parallel": {"tp": 2, "pp": 4}}),
        more=True,
    ),
    *(
        case(
            "trn2",
            {
                "compute.instance_type": kind,
                "parallel": {"tp": 2},
                "train.global_batch_size": batch,
            },
            f"{kind} is for a {cluster}",
            (
                (
                    "set compute.instance_type: ml.trn2.48xlarge and parallel: auto"
                    if batch == 8
                    else "set compute.instance_type: ml.trn2.48xlarge"
                ),
                {
                    "compute.instance_type": "ml.trn2.48xlarge",
                    **({"parallel": "auto"} if batch == 8 else {}),
                },
            ),
        )
        for kind, batch, cluster in (
            ("ml.trn2u.48xlarge", 64, "Slurm cluster on EC2"),
            ("trn3-gen1", 64, "Slurm cluster on EC2"),
            ("trn3-gen2", 8, "Slurm cluster on EC2"),
            ("ml.trn2.3xlarge", 8, "HyperPod or other Slurm cluster"),
        )
    ),
    case(
        "trn1",
        {LNC: "2"},
        "takes 1 only, as its cores are not grouped",
        ("leave it out", {LNC: OUT}),
    ),
    case("trn2", {LNC: "4"}, "and ml.trn2.48xlarge takes 1 or 2", ("leave it out", {LNC: OUT})),
    case(
        "trn2", {LNC: "2", OLD_LNC: "1"}, "which means the same", ("leave it out", {OLD_LNC: OUT})
    ),
    case(
        "trn2",
        {"compute.environment.NEURON_CC_FLAGS": "--lnc=1"},
        "compiles for LNC 1, and the runtime has LNC 2",
        ("leave --lnc=1 out of it", {"compute.environment.NEURON_CC_FLAGS": OUT}),
    ),
    case(
        "trn2",
        {"compute.processes_per_instance": 128, "train.global_batch_size": 128},
        "and ml.trn2.48xlarge has 64 Neuron cores",
        ("set at most 64", {"compute.processes_per_instance": 64}),
        ("or compute.environment.NEURON_LOGICAL_NC_CONFIG: '1'", {LNC: "1"}),
    ),
)

VOLUME = {"claim": "fsx", "path": "/mnt/fsx"}
KUBERNETES = (
    case(
        "kubernetes",
        {"kubernetes.storage": OUT},
        "kubernetes.storage: is missing",
        ("name a bucket and a prefix", {"kubernetes.storage": "s3://my-bucket/smtrain"}),
    ),
    *(
        case(
            "kubernetes",
            {"name": name},
            f"name: {name} cannot name pods",
            ("choose another", {"name": "llama"}),
        )
        for name in ("Llama", "a" * 36, "a--b", "7b")
    ),
    case(
        "kubernetes",
        {"compute.image": OUT},
        "compute.image: is missing, and a cluster has no default",
        ("name an image", {"compute.image": "registry/train:2"}),
    ),
    case(
        "kubernetes",
        {"kubernetes.resources": OUT},
        "kubernetes.resources: is missing",
        ("give what a pod gets", {"kubernetes.resources": {"nvidia.com/gpu": "4"}}),
    ),
    case(
        "kubernetes",
        {"compute.environment": {"LONG": "x" * 131_072}},
        "compute.environment: LONG has more than 131,071 bytes",
        ("put the text into a file", {"compute.environment": {"LONG": "/mnt/fsx/long"}}),
    ),
    case(
        "kubernetes",
        {"checkpoint.s3_uri": "s3://bucket/c"},
        "on Kubernetes checkpoints lie below",
        "leave it out",
    ),
    *(
        case(
            "kubernetes",
            {f"compute.{name}": value},
            f"compute.{name}: applies to SageMaker only",
            "leave it out",
            more=more,
        )
        for name, value, more in (
            ("spot", True, False),
            ("fallback_regions", ["us-west-2"], True),
            ("keep_alive", 60, False),
            ("training_plan", PLAN, False),
            ("infra_check", True, False),
            ("retries", 2, False),
            ("compile_ahead", True, True),
            ("instance_group", "g", False),
        )
    ),
    case(
        "kubernetes",
        {"network.isolation": True},
        "network: applies to SageMaker only",
        "leave it out",
    ),
    case(
        "kubernetes",
        {"data.machines": 2},
        "data.machines: on Kubernetes one pod prepares",
        "leave it out",
    ),
    case(
        "kubernetes",
        {"data.ray_address": "ray://x:1"},
        "data.ray_address: on Kubernetes one pod prepares",
        "leave it out",
        more=True,
    ),
    case(
        "kubernetes",
        {"track.tensorboard": "live"},
        "track.tensorboard: SageMaker alone copies",
        "leave it out",
    ),
    case(
        "kubernetes",
        {"kubernetes.data": [VOLUME, {**VOLUME, "path": "/mnt/fsx/x"}]},
        "overlaps /mnt/fsx of kubernetes.data.0",
        (
            "give it a separate folder, such as /mnt/data1",
            {"kubernetes.data": [VOLUME, {**VOLUME, "path": "/mnt/data1"}]},
        ),
    ),
)

QUOTA = {"cpu": 96, "memory": "1000Gi", "gpu": 4}
ON_QUOTA = both({"pai.ecs_spec": OUT}, {"pai.quota": "quota1", "pai.resources": QUOTA})
OTHER_MOUNT = {"uri": "nas://1.cn-beijing.nas.aliyuncs.com/text", "path": "/mnt/nas"}
PAI = (
    case(
        "pai",
        {"pai.region": OUT},
        "pai.region: is missing",
        ("name one", {"pai.region": "cn-beijing"}),
    ),
    case(
        "pai",
        {"pai.storage": OUT},
        "pai.storage: is missing",
        ("name a bucket and a prefix", {"pai.storage": "oss://my-bucket/smtrain"}),
    ),
    case(
        "pai",
        {"pai.storage": "oss://My_Bucket/x"},
        "'My_Bucket' cannot be a bucket's name",
        ("correct it", {"pai.storage": "oss://my-bucket/x"}),
    ),
    case(
        "pai",
        {"compute.image": OUT},
        "compute.image: is missing; name an image that",
        ("name an image", {"compute.image": "registry/train:2"}),
    ),
    case(
        "pai",
        {"pai.ecs_spec": OUT},
        "pai.ecs_spec: is missing",
        ("name a type of public resources", {"pai.ecs_spec": "ecs.gn7e-c16g1.16xlarge"}),
        (
            "set pai.quota and pai.resources instead",
            {"pai.quota": "quota1", "pai.resources": QUOTA},
        ),
    ),
    case(
        "pai",
        both({"pai.ecs_spec": OUT}, {"pai.quota": "quota1"}),
        "pai.resources: is missing",
        ("give what a pod gets from the quota", {"pai.resources": QUOTA}),
    ),
    *(
        case(
            "pai",
            both(ON_QUOTA, {f"pai.{name}": "ecs.g7.8xlarge"}),
            f"pai.{name}: is for public",
            "leave it out",
        )
        for name in ("ecs_spec", "cpu_ecs_spec")
    ),
    *(
        case(
            "pai",
            {f"pai.{name}": value},
            f"pai.{name}: has no effect without pai.quota",
            "leave it out",
        )
        for name, value in {"resources": QUOTA, "cpu_resources": QUOTA, "priority": 2}.items()
    ),
    case(
        "pai",
        both(ON_QUOTA, {"pai.resources.gpu": 3}),
        "a pod would have 3 GPUs for 4 training",
        ("set it to 4", {"pai.resources.gpu": 4}),
    ),
    case(
        "pai",
        {"machines": {"box": {**BOX, "kind": "neuron"}}},
        "PAI-DLC has no Neuron devices",
        ("describe a machine of kind gpu", {"machines": {"box": BOX}}),
        more=True,
    ),
    case(
        "pai",
        {"compute.instance_type": "ml.p5.48xlarge"},
        "ml.p5.48xlarge is not one of PAI-DLC",
        (
            "describe the GPUs of a pod under machines, and name that entry",
            {"compute.instance_type": "box"},
        ),
    ),
    case(
        "pai",
        {"train.engine": "nxd"},
        "nxd is for Trainium, which PAI-DLC",
        ("set native", {"train.engine": "native"}),
        more=True,
    ),
    case(
        "pai",
        {"pai.error_monitoring_args": "--a=b"},
        "no effect without pai.error_monitoring",
        "leave it out",
    ),
    case(
        "pai",
        {"pai.code": {"source": "code-1"}},
        "pai.code: is for a command of your own",
        "leave it out",
    ),
    case(
        "pai",
        {"pai.command": "x" * 50_000},
        "pai.command: has 50,000 bytes",
        (
            "put it into a script below pai.storage, and call that",
            {"pai.command": "sh /mnt/smtrain/train.sh"},
        ),
    ),
    case(
        "pai",
        {"pai.command": f"HF_TOKEN=hf_{'aB3' * 12} python train.py"},
        "pai.command: looks like a secret",
        (
            "keep it in a file of the image or of a mount",
            {"pai.command": ". /root/token; python train.py"},
        ),
    ),
    case(
        "pai",
        {"pai.command": "python train.py ("},
        "pai.command: bash cannot read it (syntax error",
        ("correct the line", {"pai.command": "python train.py"}),
    ),
    case(
        "pai",
        {"pai.vpc": {"id": "vpc-1", "switch": "vsw-1", "security_group": "sg-1"}},
        "pai.vpc.cidrs: is missing",
        ("name them", {"pai.vpc.cidrs": ["192.168.0.0/16"]}),
    ),
    case(
        "pai",
        {"checkpoint.s3_uri": "s3://bucket/c"},
        "on PAI-DLC checkpoints lie below",
        "leave it out",
    ),
    *(
        case(
            "pai",
            {f"compute.{name}": value},
            f"compute.{name}: applies to SageMaker only",
            "leave it out",
            more=more,
        )
        for name, value, more in (
            ("spot", True, False),
            ("keep_alive", 60, False),
            ("fallback_regions", ["eu-north-1"], False),
            ("training_plan", PLAN, False),
            ("infra_check", True, False),
            ("retries", 2, False),
            ("compile_ahead", True, True),
            ("instance_group", "g", False),
        )
    ),
    case("pai", {"network.isolation": True}, "network: applies to SageMaker only", "leave it out"),
    case("pai", {"data.machines": 2}, "data.machines: on PAI-DLC one pod prepares", "leave it out"),
    case(
        "pai",
        {"data.ray_address": "ray://x:1"},
        "data.ray_address: on PAI-DLC one pod prepares",
        "leave it out",
        more=True,
    ),
    case(
        "pai",
        {"model.path": "hf://a/b", "model.token": {"secret": "hf"}},
        "model.token: names a secret of AWS",
        (
            "leave it out, and give a copy of the model",
            {"model.path": "@/model", "model.token": OUT},
        ),
    ),
    case(
        "pai",
        {"track.tensorboard": "live"},
        "track.tensorboard: SageMaker alone copies",
        "leave it out",
    ),
    case(
        "pai",
        {"track.wandb": {"project": "p", "key": {"secret": "w"}}, "track.by": "job"},
        "track.wandb.key: names a secret of AWS",
        "set track.by: client",
    ),
    case(
        "pai",
        {"pai.data": [{"path": "/mnt/nas"}]},
        "must name one of uri and dataset",
        ("leave the other out", {"pai.data": [OTHER_MOUNT]}),
    ),
    case(
        "pai",
        {"pai.data": [{**OTHER_MOUNT, "path": "/mnt/smtrain/x"}]},
        "overlaps /mnt/smtrain of pai.mount",
        (
            "give it a separate folder, such as /mnt/data0",
            {"pai.data": [{**OTHER_MOUNT, "path": "/mnt/data0"}]},
        ),
    ),
    case(
        "pai",
        {"pai.data": [{**OTHER_MOUNT, "path": "/mnt/oss"}]},
        "overlaps /mnt/oss of the mounts of other buckets",
        (
            "give it a separate folder, such as /mnt/data0",
            {"pai.data": [{**OTHER_MOUNT, "path": "/mnt/data0"}]},
        ),
    ),
    case(
        "local",
        {"model.path": "demo://tiny-lama"},
        "model.path: demo://tiny-lama is not a demo model",
        ("did you mean demo://tiny-llama?", {"model.path": "demo://tiny-llama"}),
    ),
    case(
        "local",
        {"data.path": "demo://tiny-llama"},
        "data.path: demo://tiny-llama is not a demo text",
        ("known: demo://python-stdlib", {"data.path": "demo://python-stdlib"}),
    ),
    case("pai", {"data.path": "s3://bucket/text"}, "is not a path, oss://, hf:// or demo://"),
    case(
        "pai",
        {"model.path": "s3://bucket/model"},
        "is not a folder, oss://, hf://, modelscope://, jumpstart://, demo:// or run://",
    ),
    case(
        "pai",
        {"data.prepared": "/nowhere"},
        "holds no manifest.json",
        (
            "give a folder that `smtrain data prepare` or stage prepare wrote",
            {"data.prepared": OUT},
        ),
        ("or its oss:// URI", {"data.prepared": "oss://bucket/prepared", "data.path": OUT}),
        more=True,
    ),
)

CASES = {
    "machines": MACHINES,
    "train": TRAIN,
    "data": DATA,
    "model": MODEL,
    "planner": PLANNER,
    "trainium": TRAINIUM,
    "kubernetes": KUBERNETES,
    "pai": PAI,
}
