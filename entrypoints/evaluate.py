"""Stage evaluate: the models in channels `model` and `base` on the tasks of channel `tasks` ->
evaluation.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

from smtrain.core.config import JobConfig
from smtrain.core.protocol.container import Container
from smtrain.worker.entry import main


def stage(config: JobConfig, container: Container) -> None:
    from smtrain.worker.evaluation import report
    from smtrain.worker.evaluation.evaluate import evaluate, format_result, save
    from smtrain.worker.evaluation.harness import EvaluationRequest
    from smtrain.worker.evaluation.long_context import LongRequest

    # The harness imports a library of this file's name, so this folder must not be searched.
    folder = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != folder]
    options = config.evaluate
    tasks = container.channel("tasks") if options.data else None
    request = EvaluationRequest(
        options.harness_tasks,
        tasks,
        options.num_fewshot,
        options.limit,
        options.chat_template,
        options.batch_size,
        options.run_generated_code,
        config.model.chat_template_kwargs,
    )
    text = container.channel("text") if options.text else None
    long = (
        LongRequest(options.long_tasks, options.lengths, text, options.limit)
        if options.long_tasks
        else None
    )
    base_path = container.channel("base") if container.has_channel("base") else None
    base = base_path if options.base else None
    evaluation = evaluate(
        container.channel("model"),
        base,
        request,
        lambda message: print(message, flush=True),
        base_path,
        long,
    )
    save(evaluation, container.model_dir)
    print(format_result(evaluation), flush=True)
    for line in report.lines(evaluation):
        print(line, flush=True)


if __name__ == "__main__":
    main(stage)
