"""Stage evaluate: the models in channels `model` and `base` on the tasks of channel `tasks` -> evaluation.json."""

from __future__ import annotations

from smtrain.core.config import JobConfig
from smtrain.core.protocol.container import Container
from smtrain.worker.train.entry import main


def stage(config: JobConfig, container: Container) -> None:
    from smtrain.worker.evaluation import report
    from smtrain.worker.evaluation.evaluate import evaluate, save, shown
    from smtrain.worker.evaluation.harness import EvaluationRequest

    options = config.evaluate
    tasks = container.channel("tasks") if options.data else None
    request = EvaluationRequest(
        options.tasks, tasks, options.num_fewshot, options.limit, options.chat_template, options.batch_size
    )
    before = container.channel("base") if container.has_channel("base") else None
    base = before if options.base else None
    made = evaluate(container.channel("model"), base, request, lambda text: print(text, flush=True), before)
    save(made, container.model_dir)
    print(shown(made), flush=True)
    for line in report.lines(made):
        print(line, flush=True)


if __name__ == "__main__":
    main(stage)
