"""Wrong uses of people who come from other tools or mistype, one a row: the call, its exit status,
the words that it must say.

A call is written as in a shell; NAME=VALUE in front is its environment. `set KEY=VALUE` stands for
a dry run of a fine config with that key. Files are those of `wrong_uses.world` and of `more_files`.
"""

from __future__ import annotations

import re
import shlex
import struct
from pathlib import Path

Row = tuple[str, int, str]
"""The call, its exit status, and the words that its sentence must hold, separated by ` | `."""

COMMAND_LINE: list[Row] = [
    ("trian run.yaml", 2, "did you mean `smtrain launch CONFIG --stage train`"),
    ("train run.yaml", 2, "did you mean `smtrain launch CONFIG --stage train`"),
    ("fit run.yaml", 2, "did you mean `smtrain run CONFIG`"),
    ("xyzzy", 2, "`smtrain --help` lists the commands"),
    ("pla run.yaml", 2, "did you mean `smtrain plan`"),
    ("Plan run.yaml", 2, "did you mean `smtrain plan`"),
    ("PLAN run.yaml", 2, "did you mean `smtrain plan`"),
    ("lauch run.yaml", 2, "did you mean `smtrain launch`"),
    ("ls", 2, "did you mean `smtrain list`"),
    ("ps", 2, "did you mean `smtrain list`"),
    ("cancel job", 2, "did you mean `smtrain stop`"),
    ("tail job", 2, "did you mean `smtrain logs`"),
    ("log job", 2, "did you mean `smtrain logs`"),
    ("infer model", 2, "did you mean `smtrain generate`"),
    ("eval model", 2, "did you mean `smtrain evaluate`"),
    ("prepare text", 2, "did you mean `smtrain data prepare`"),
    ("inspect model", 2, "did you mean `smtrain checkpoint inspect` or `smtrain data inspect`"),
    ("policy run.yaml", 2, "did you mean `smtrain iam policy`"),
    ("export run.yaml", 2, "did you mean `smtrain launch CONFIG --stage export`"),
    ("help nosuch-page", 2, "there is no page 'nosuch-page'; `smtrain help` lists them"),
    ("help slrum", 2, "did you mean `smtrain help slurm`?"),
    ("version", 2, "did you mean `smtrain --version`"),
    ("-v", 2, "did you mean `smtrain --version`"),
    ("run.yaml", 2, "did you mean `smtrain run run.yaml`"),
    ("data prepar text to", 2, "did you mean `smtrain data prepare`"),
    ("data tokenize text to", 2, "did you mean `smtrain data prepare`"),
    ("data nothing", 2, "smtrain data prepare"),
    ("checkpoint inspekt model", 2, "did you mean `smtrain checkpoint inspect`"),
    ("iam polcy run.yaml", 2, "did you mean `smtrain iam policy`"),
    ("local sttus", 2, "did you mean `smtrain local status`"),
    ("image biuld", 2, "did you mean `smtrain image build`"),
    ("pool ls", 2, "did you mean `smtrain pool list`"),
    ("config shw run.yaml", 2, "did you mean `smtrain config show`"),
    ("cluster tempalte run.yaml", 2, "did you mean `smtrain cluster template`"),
    ("run run.yaml --dryrun", 2, "did you mean --dry-run"),
    ("run run.yaml --dry_run", 2, "did you mean --dry-run"),
    ("plan run.yaml --machine ml.trn1.32xlarge:1", 2, "did you mean --machines"),
    ("plan run.yaml --dedline 5", 2, "did you mean --deadline"),
    ("launch run.yaml --stages train", 2, "did you mean --stage"),
    ("logs job --folow", 2, "did you mean --follow"),
    ("generate model --max-tokens 5 --prompt x", 2, "did you mean --max-new-tokens"),
    ("generate model --temprature 1 --prompt x", 2, "did you mean --temperature"),
    ("evaluate model --task mmlu", 2, "did you mean --tasks"),
    ("convert model to --form nxd", 2, "--to"),
    ("run --config run.yaml", 2, "smtrain run CONFIG"),
    ("run", 2, "missing argument 'CONFIG'"),
    ("run run.yaml text", 2, "unexpected extra argument (text)"),
    ("run run.yaml train.lr=1e-4", 2, "--set train.lr=1e-4"),
    ("run run.yaml --train.lr 1e-4", 2, "--set train.lr=1e-4"),
    ("run run.yaml --train.lr=1e-4", 2, "--set train.lr=1e-4"),
    ("run run.yaml --lr 1e-4", 2, "--set train.lr=1e-4"),
    ("run run.yaml --learning-rate 1e-4", 2, "--set train.lr=1e-4"),
    ("list --limt 5", 2, "did you mean --limit?"),
    ("chat model --temp 1", 2, "did you mean --template or --temperature?"),
    ("chat model --system-prompt x", 2, "did you mean --system?"),
    ("download job --out to", 2, "FOLDER is given without an option, `smtrain download FOLDER`"),
    ("launch run.yaml train", 2, "did you mean --stage train?"),
    ("deploy run --instance-type ml.g6e.xlarge", 2, "did you mean --instance?"),
    ("config shema", 2, "did you mean `smtrain config schema`"),
    ("image build --pussh x", 2, "did you mean --push?"),
    ("local clean --older 7d", 2, "did you mean --older-than?"),
    ("run RUN.YAML", 2, "did you mean run.yaml?"),
    ("run run", 2, "did you mean run.yaml?"),
]  # fmt: skip
CHOICES: list[Row] = [
    ("launch run.yaml --stage trian", 2, "did you mean train"),
    ("launch run.yaml --stage tokenize", 2, "did you mean prepare"),
    (
        "launch run.yaml --stage nap",
        2,
        "fetch, prepare, convert, compile, train, export, generate, evaluate",
    ),
    ("check run.yaml --stage Train", 2, "did you mean train"),
    ("run run.yaml --target lokal", 2, "did you mean local"),
    ("run run.yaml --target sagemaker", 2, "did you mean aws"),
    ("status job --target cloud", 2, "local, aws, slurm"),
    ("status job --target AWS", 2, "did you mean aws"),
    ("SMTRAIN_TARGET=lokal status job", 2, "SMTRAIN_TARGET | did you mean local"),
    ("SMTRAIN_TARGET=lokal list", 2, "SMTRAIN_TARGET | did you mean local"),
    ("SMTRAIN_TARGET=sagemaker logs job", 2, "SMTRAIN_TARGET | did you mean aws"),
    ("convert model to --to huggingface", 2, "did you mean hf"),
    ("convert model to --to nxdd", 2, "did you mean nxd"),
    ("convert model to --to gguf", 2, "hf, | nxd"),
    ("convert model to --to megatorn", 2, "did you mean megatron"),
    ("plan run.yaml --rank chepest", 2, "did you mean"),
    ("serve model --server vlm", 2, "did you mean vllm"),
    ("images --engine nativ", 2, "did you mean native"),
    ("data prepare text to --model tokenizer --format jsnl", 2, "did you mean jsonl"),
    ("data prepare text to --model tokenizer --objective sfft", 2, "did you mean sft"),
    ("download job to --what modell", 2, "did you mean model"),
    ("set target=lokal", 2, "did you mean local"),
    ("set target=sagemaker", 2, "did you mean aws"),
    ("set train.precision=bfloat16", 2, "train.precision | did you mean bf16"),
    ("set train.precision=bf17", 2, "train.precision | did you mean bf16"),
    ("set train.precision=float32", 2, "train.precision | did you mean fp32"),
    ("set train.schedule=cosin", 2, "did you mean cosine"),
    ("set train.objective=pretraining", 2, "did you mean pretrain"),
    ("set train.objective=pt", 2, "did you mean pretrain"),
    ("set train.engine=nativ", 2, "did you mean native"),
    ("set data.format=jsnl", 2, "did you mean jsonl"),
    ("set data.unicode=NFC", 2, "did you mean nfc"),
    ("set data.pii=masks", 2, "did you mean mask"),
    ("set data.filters=[gopher]", 2, "did you mean gopher_quality"),
    ("set checkpoint.verify=ful", 2, "did you mean full"),
    ("set notify.on=[fail]", 2, "did you mean failed"),
    ("set data.encoding=latin-11", 2, "did you mean"),
    ("convert model to --to hf --dtype bfloat16", 2, "did you mean bf16"),
    ("data prepare text to --model tokenizer --filter gophers", 2, "did you mean gopher_quality"),
    ("SMTRAIN_TARGET=clusterr list", 2, "did you mean slurm"),
    (
        "AWS_PROFILE=nosuch status job --target aws",
        2,
        "AWS_PROFILE | there is no AWS profile 'nosuch'",
    ),
    ("set model.init=random", 2, "did you mean scratch"),
    ("set local.run_in=dokcer", 2, "did you mean docker"),
]
KEYS: list[Row] = [
    ("set name='${USER}-run'", 2, "${USER} is not expanded here, so write its value"),
    ("set train.steps='$STEPS'", 2, "$STEPS is not expanded here"),
    ("set model.path='$HOME/m'", 2, "$HOME is not expanded here"),
    ("set data.path=/", 2, "/ holds the files of the whole system; give the folder of the text"),
    ("set data.path=nothing.txt", 2, "it is a link to /nowhere/text.txt, which is missing"),
    ("run settings.toml --dry-run", 2, "a config is a YAML or JSON file, not .toml"),
    ("check https://host/run.yaml", 2, "`curl -O https://host/run.yaml` downloads it"),
    ("list --name [", 2, "--name: got '['; names of jobs hold letters, digits and hyphens only"),
    ("images --region mars-1", 2, "name a region such as us-west-2"),
    ("set train.learning_rate=1e-4", 2, "did you mean train.lr"),
    ("set learning_rate=1e-4", 2, "did you mean train.lr"),
    ("set lr=1e-4", 2, "did you mean train.lr"),
    ("set train.batch_size=4", 2, "did you mean train.global_batch_size"),
    ("set train.stpes=4", 2, "did you mean train.steps"),
    ("set trian.steps=4", 2, "did you mean train"),
    ("set train.epochs=3", 2, "did you mean train.steps"),
    ("set train.max_seq_length=64", 2, "did you mean train.seq_len"),
    ("set train.adapter.r=8", 2, "did you mean train.adapter.rank"),
    ("set train.tp=2", 2, "did you mean parallel.tp"),
    ("set parallel.tensor_parallel=2", 2, "did you mean parallel.tp"),
    ("set parallel.micro_batch=2", 2, "did you mean parallel.micro_batch_size"),
    ("set compute.instance=ml.trn1.2xlarge", 2, "did you mean compute.instance_type"),
    ("set compute.nodes=2", 2, "did you mean compute.instance_count"),
    ("set compute.instance_typ=ml.trn1.2xlarge", 2, "did you mean compute.instance_type"),
    ("set data.file=text", 2, "did you mean data.path"),
    ("set data.text_colum=text", 2, "did you mean data.text_column"),
    ("set data.text_field=text", 2, "did you mean data.text_column"),
    ("set dataset.path=text", 2, "did you mean data"),
    ("set models.path=model", 2, "did you mean model"),
    ("set model.name=model", 2, "did you mean"),
    ("set model.pth=model", 2, "did you mean model.path"),
    ("set output.dir=out", 2, "did you mean output.s3_uri"),
    ("set checkpoint.keeep=2", 2, "did you mean checkpoint.keep"),
    ("set track.wandb.projekt=x", 2, "did you mean track.wandb.project"),
    ("set evaluate.task=mmlu", 2, "did you mean evaluate.tasks"),
    ("set generate.max_tokens=4", 2, "did you mean generate.max_new_tokens"),
    ("set export.merge_adapter=true", 2, "did you mean export.merge"),
    ("set network.subnet=[a]", 2, "did you mean network.subnets"),
    ("set notify.mail=a@b", 2, "notify.mail: unknown key; known:"),
    ("set cluster.hst=x", 2, "did you mean cluster.host"),
    ("set local.runin=docker", 2, "did you mean local.run_in"),
    ("tune run.yaml --over train.learning_rate=1e-4,2e-4", 2, "did you mean train.lr"),
    ("tune run.yaml --over lr=1e-4,2e-4", 2, "train.lr"),
    ("run run.yaml --set train.lr 1e-4", 2, "did you mean --set train.lr=1e-4"),
    ("run run.yaml --set train.lr", 2, "must look like train.lr=2e-4"),
    ("plan wrong-key.yaml", 2, "did you mean train.lr"),
    ("plan trainer.yaml", 2, "holds no key of a config | did you mean"),
]  # fmt: skip
VALUES: list[Row] = [
    ("set train.lr=2e-4%", 2, "train.lr: got '2e-4%'; a number is needed"),
    ("set train.steps=1k", 2, "train.steps: got '1k'; a whole number is needed"),
    ("set train.seq_len=4096tokens", 2, "train.seq_len: got '4096tokens'; a whole number"),
    ("set train.seq_len=4k", 2, "a whole number is needed"),
    ("set train.seq_len=100000000", 2, "positions"),
    ("set train.seq_len=0", 2, "it must be at least"),
    ("set train.deterministic=maybe", 2, "it is true or false"),
    ("set train.betas=0.9", 2, "a list is needed"),
    ("set compute.max_run=3 hours", 2, "compute.max_run: got '3 hours' | '2h30m'"),
    ("set compute.max_run=2weeks", 2, "compute.max_run: got '2weeks'"),
    ("set compute.volume_gb=500GB", 2, "a whole number is needed"),
    ("set compute.instance_type=ml.trn1.32xl", 2, "did you mean ml.trn1.32xlarge"),
    ("set compute.instance_type=p5.48xlarge", 2, "did you mean ml.p5.48xlarge"),
    ("set compute.instance_type=trn1.32xlarge", 2, "did you mean ml.trn1.32xlarge"),
    ("set compute.instance_type=ml.p5.48xlage", 2, "did you mean ml.p5.48xlarge"),
    ("set compute.instance_type=H100", 2, "ml.p5"),
    ("plan run.yaml --machines ml.trn1.32xl:1", 2, "did you mean ml.trn1.32xlarge"),
    ("plan run.yaml --machines p5.48xlarge:1", 2, "did you mean ml.p5.48xlarge"),
    ("deploy run --instance ml.g6e.xlage", 2, "did you mean ml.g6e.xlarge"),
    ("register run --instance g6e.xlarge", 2, "did you mean ml.g6e.xlarge"),
    ("plan run.yaml --machines trn1:2", 2, "did you mean ml.trn1"),
    ("plan run.yaml --machines H100:8", 2, "did you mean ml.p5"),
    (
        "set compute.fallback_instance_types=[ml.trn1.32xl]",
        2,
        "ml.trn1.32xlarge is the nearest one",
    ),
    ("set compute.cpu_instance_type=m5.4xlarge", 2, "did you mean ml.m5.4xlarge"),
    (
        "init new.yaml --model model --data text --machines ml.trn1.32xl:1",
        2,
        "did you mean ml.trn1.32xlarge",
    ),
    ("set compute.region=us-west2", 2, "did you mean us-west-2"),
    ("images --region us-wst-2", 2, "did you mean us-west-2"),
    ("set parallel.tp=64", 2, "tp x pp = 128 | 2 machines x 2 processes = 4"),
    ("set parallel.tp=3", 2, "tp x pp = 6 | 2 machines x 2"),
    ("set parallel.dp=7", 2, "2 machines x 2 | dp = 1 would do"),
    ("set train.global_batch_size=0", 2, "it must be"),
    ("set parallel=tp2", 2, "it is a section with keys | auto"),
    ("set parallel=Auto", 2, "auto"),
    ("set train=fast", 2, "it is a section"),
    ("set model=model", 2, "model.path"),
    ("set data=text", 2, "data.path"),
    ("set compute.spot=yes please", 2, "it is true or false"),
    ("set name=my_run", 2, "name: got 'my_run' | hyphens"),
    ("set compute.role=arn:aws:iam::12:role/x", 2, "compute.role"),
    ("plan run.yaml --budget 100$", 2, "--budget"),
    ("plan run.yaml --deadline 5h", 2, "--deadline"),
    ("run run.yaml --every soon", 2, "--every | '2h30m'"),
    ("local clean --older-than week", 2, "--older-than | '3d'"),
    ("logs job --since yesterday", 2, "--since"),
    ("plan --model nosuch", 2, "missing argument CONFIG | known: llama-2-7b"),
    ("plan --model lama-3-8b", 2, "did you mean llama-3-8b"),
    ("plan run.yaml --prices price.toml", 2, "cannot be read"),
    ("plan run.yaml --model nosuch", 2, "nosuch | llama-3-8b"),
    ("plan run.yaml --model lama-3-8b", 2, "did you mean llama-3-8b"),
    ("plan run.yaml --model hf://org/llama-3-9b", 2, "did you mean llama-3-8b"),
]
ADDRESSES: list[Row] = [
    ("set model.path=https://huggingface.co/org/name", 2, "hf://org/name"),
    ("set model.path=https://huggingface.co/org/name/tree/main", 2, "hf://org/name"),
    ("set model.path=https://huggingface.co/org/name/blob/v1/config.json", 2, "hf://org/name@v1"),
    ("set model.path=hf.co/org/name", 2, "hf://org/name"),
    ("set model.path=huggingface.co/org/name", 2, "hf://org/name"),
    ("set model.path=http://huggingface.co/org/name/", 2, "hf://org/name"),
    ("set model.path=https://modelscope.cn/models/org/name", 2, "modelscope://org/name"),
    ("set model.path=https://huggingface.co/name", 2, "hf://organization/name"),
    ("set data.path=https://huggingface.co/datasets/org/name", 2, "hf://org/name"),
    ("set data.path=https://huggingface.co/datasets/org/name/tree/main/data", 2, "hf://org/name"),
    (
        "set train.validation.path=https://huggingface.co/datasets/org/name",
        2,
        "train.validation.path | a path, s3://",
    ),
    ("set model.weights=https://huggingface.co/org/name", 2, "model.weights"),
    ("plan run.yaml --model https://huggingface.co/org/name", 2, "hf://org/name"),
    ("chat https://huggingface.co/org/name", 2, "org/name | hf download org/name"),
    ("generate https://huggingface.co/org/name --prompt x", 2, "org/name | hf download"),
    ("generate hf://org/name --prompt x", 2, "org/name | hf download"),
    ("serve hf://org/name", 2, "org/name | hf download"),
    ("convert https://huggingface.co/org/name to --to nxd", 2, "org/name | hf download"),
    ("checkpoint inspect https://huggingface.co/org/name", 2, "org/name | hf download"),
    ("evaluate https://huggingface.co/org/name --tasks mmlu", 2, "org/name | hf download"),
    ("data prepare text to --model https://huggingface.co/org/name", 2, "org/name"),
    (
        "data prepare https://huggingface.co/datasets/org/name to --model tokenizer",
        2,
        "hf://org/name",
    ),
    ("data report https://huggingface.co/datasets/org/name", 2, "hf://org/name"),
    (
        "init new.yaml --model https://huggingface.co/org/name --data text --machines here",
        2,
        "hf://org/name",
    ),
    ("push model https://huggingface.co/me/llama", 2, "me/llama"),
    ("set data.path=https://bucket.s3.amazonaws.com/text/a.jsonl", 2, "s3://bucket/text/a.jsonl"),
    ("set data.path=https://bucket.s3.us-west-2.amazonaws.com/text", 2, "s3://bucket/text"),
    ("set data.path=https://s3.us-west-2.amazonaws.com/bucket/text", 2, "s3://bucket/text"),
    ("set model.path=s3a://bucket/model", 2, "s3://bucket/model"),
    ("set model.path=s3:/bucket/model", 2, "s3://bucket/model"),
    ("set model.path=S3://bucket/model", 2, "s3://bucket/model"),
    ("set model.path=hf:org/name", 2, "hf://org/name"),
    ("set model.path=hf:/org/name", 2, "hf://org/name"),
    ("set model.path=hf://name", 2, "hf://organization/model"),
    ("set model.path=HF://org/name", 2, "hf://org/name"),
    ("set model.path=s3://", 2, "bucket"),
    ("set data.path=s3:///text", 2, "bucket"),
    ("set data.path=gs://bucket/text", 2, "s3://"),
    ("set data.path=file:///data/text", 2, "/data/text"),
    ("set model.path=file:///models/x", 2, "/models/x"),
    ("set model.path=~/nowhere", 2, "is not a folder"),
    ("set data.path=~/nowhere", 2, "does not exist"),
    ("set model.path=modle", 2, "did you mean | model"),
    ("set data.path=txet", 2, "did you mean | text"),
    ("set data.path='text/*.parquet'", 2, "no file matches"),
    ("set data.path=an-empty-folder", 2, "it is empty"),
    ("set model.path=an-empty-folder", 2, "holds no config.json"),
    ("set model.path=hf://meta-llama/Llama-3.2-1B", 2, "model.token: is missing | is gated"),
    ("set model.path=https://huggingface.co/datasets/org/name", 2, "is not a folder, s3://, hf://"),
    ("set data.path=arn:aws:s3:::bucket/text", 2, "s3://bucket/text"),
    ("set checkpoint.s3_uri=https://bucket.s3.amazonaws.com/x", 2, "did you mean s3://bucket/x?"),
    ("chat org/name", 2, "hf download org/name"),
    ("chat modle", 2, "did you mean model?"),
    ("convert modle to --to nxd", 2, "did you mean model?"),
    ("data prepare text to --model tokenizr", 2, "did you mean tokenizer?"),
    ("data prepare txet to --model tokenizer", 2, "did you mean text?"),
    ("init new.yaml --model modle --data text --machines here", 2, "did you mean"),
    ("set model.path=org/name", 2, "hf://org/name"),
    ("set output.s3_uri=bucket/x", 2, "s3://bucket/"),
    ("set output.s3_uri=https://bucket.s3.amazonaws.com/x", 2, "s3://bucket/x"),
    ("set data.prepared=https://huggingface.co/datasets/org/name", 2, "data.prepared"),
    ("plan run.yml", 2, "did you mean | run.yaml"),
    ("plan nowhere.yaml", 2, "`smtrain init nowhere.yaml`"),
    ("run nowhere.yaml", 2, "`smtrain init nowhere.yaml`"),
    ("check text", 2, "text holds no config.json"),
    ("generate ./nope --prompt x", 2, "no such folder"),
    ("chat nope", 2, "nope"),
]
TEXT: list[Row] = [
    ("set data.path=latin.txt", 2, "latin.txt | ISO-8859-1 | iconv -f"),
    ("set data.path=utf16.txt", 2, "utf16.txt | UTF-16LE | iconv -f UTF-16LE"),
    ("data prepare latin.txt to --model tokenizer", 2, "iconv -f"),
    ("data prepare utf16.txt to --model tokenizer", 2, "iconv -f"),
    ("data report latin.txt", 2, "iconv -f"),
    ("set data.path=empty.jsonl", 2, "is empty"),
    ("data prepare empty.jsonl to --model tokenizer", 2, "empty.jsonl"),
    ("set data.path=not.jsonl.gz", 2, "not.jsonl.gz"),
    ("data prepare not.jsonl.gz to --model tokenizer", 2, "not.jsonl.gz | gzip"),
    ("data prepare other-field.jsonl to --model tokenizer", 2, "--text-column to body"),
    ("data prepare other-field.csv to --model tokenizer", 2, "body"),
    ("data prepare other-field.parquet to --model tokenizer", 2, "body"),
    ("data prepare text to --model tokenizer --text-column txt", 2, "text"),
    ("data prepare lone-bin to --model tokenizer --format megatron", 2, "tokens.idx"),
    ("set data.path=lone-bin/tokens.bin data.format=megatron", 2, "tokens.idx"),
    ("data prepare picture-as.parquet to --model tokenizer", 2, "picture-as.parquet"),
    ("set data.path=book.docx", 2, "book.docx"),
    ("set data.path=book.pdf", 2, "book.pdf"),
    ("data inspect text", 2, "manifest.json"),
    ("data merge text to", 2, "manifest.json"),
    ("data inspect nowhere", 2, "nowhere"),
    ("data prepare text to", 2, "--model"),
]  # fmt: skip
NAMES: list[Row] = [
    ("status nope", 2, "nope | smtrain list"),
    ("logs nope", 2, "nope | smtrain list"),
    ("stop nope", 2, "nope | smtrain list"),
    ("download nope to", 2, "nope | smtrain list"),
    ("report nope", 2, "nope | smtrain list"),
    ("compare nope nope2", 2, "nope | smtrain list"),
    ("compare nope", 2, "two or more"),
    ("compare a.jsonl b.jsonl", 2, "a.jsonl"),
    ("tensorboard nope --out to", 2, "nope | smtrain list"),
    ("serve nope", 2, "nope | smtrain list"),
    ("push nope me/llama", 2, "nope"),
    ("undeploy nope --target local", 2, "nope"),
    ("pool release nope --target local", 2, "nope"),
    ("run run.yaml --from-step 99", 2, "99"),
    ("launch run.yaml --stage export", 2, "train"),
    ("iam policy run.yaml", 2, "--target aws"),
    ("pipeline run.yaml", 2, "--target aws"),
    ("init run.yaml --model model --data text --machines here", 2, "run.yaml is there already"),
]  # fmt: skip
GROUPED = {
    "commands and options": COMMAND_LINE,
    "choices": CHOICES,
    "keys": KEYS,
    "values": VALUES,
    "addresses": ADDRESSES,
    "text": TEXT,
    "names": NAMES,
}


def more_files(folder: Path) -> None:
    """Write the files of the rows that `wrong_uses.world` does not write."""
    words = "naïve café, déjà vu, größer, Ærø\n" * 40
    (folder / "latin.txt").write_bytes(words.encode("latin-1"))
    (folder / "utf16.txt").write_bytes(words.encode("utf-16-le"))
    (folder / "not.jsonl.gz").write_text('{"text": "a"}\n')
    (folder / "other-field.jsonl").write_text('{"body": "some words of text"}\n' * 9)
    (folder / "other-field.csv").write_text("body,id\nsome words,1\n")
    _parquet(folder / "other-field.parquet")
    (folder / "picture-as.parquet").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\xff" * 50)
    (folder / "lone-bin").mkdir()
    (folder / "lone-bin/tokens.bin").write_bytes(struct.pack("<64H", *range(64)))
    (folder / "book.docx").write_bytes(b"PK\x03\x04" + b"\0" * 200)
    (folder / "book.pdf").write_bytes(b"%PDF-1.7\n" + b"\xff\0" * 200)
    (folder / "settings.toml").write_text("[train]\nsteps = 3\n")
    (folder / "nothing.txt").symlink_to("/nowhere/text.txt")
    (folder / "wrong-key.yaml").write_text("model: {path: model}\ntrain: {learning_rate: 1}\n")
    (folder / "trainer.yaml").write_text("model_name_or_path: model\nlearning_rate: 1e-4\n")


def _parquet(file: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["some words"], "id": [1]}), file)


def call_of(row: Row) -> tuple[dict[str, str], list[str]]:
    """Environment and words of a row."""
    words = shlex.split(row[0])
    environment = {}
    while words and (match := re.fullmatch(r"([A-Z_]+)=(.*)", words[0])):
        environment[match[1]] = match[2]
        words = words[1:]
    if words[:1] == ["set"]:
        # A value with blanks belongs to the key before it.
        settings: list[str] = []
        for word in words[1:]:
            if re.match(r"[a-z_0-9.]+=", word) or not settings:
                settings.append(word)
            else:
                settings[-1] += f" {word}"
        words = [
            "run",
            "run.yaml",
            "--dry-run",
            *(one for text in settings for one in ("--set", text)),
        ]
    return environment, words
