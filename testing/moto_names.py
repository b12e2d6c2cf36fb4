"""Every name of moto that the control plane uses or replaces; moto has no hooks for them.

tests/plane/test_moto_contract.py compares these tables with our code and the installed moto, so a
release that renames something fails there and not in a user's job.
"""

from __future__ import annotations

# "module:name" -> the attributes that our code uses
USED: dict[str, tuple[str, ...]] = {
    "moto.backends:list_of_moto_modules": (),
    "moto.cloudwatch.models:MetricAggregatedDatum": (),
    "moto.cloudwatch.models:cloudwatch_backends": (),
    "moto.core.exceptions:JsonRESTError": (),
    "moto.core.responses:ActionResult": (),
    "moto.iam.exceptions:IAMException": (),
    "moto.iam.exceptions:NotFoundException": (),
    "moto.iam.models:iam_backends": (),
    "moto.iam.responses:IamResponse": (),
    "moto.logs.exceptions:InvalidParameterException": (),
    "moto.logs.exceptions:ResourceNotFoundException": (),
    "moto.logs.models:LogStream": ("_log_ids", "put_log_events", "to_describe_dict"),
    "moto.logs.models:logs_backends": (),
    "moto.logs.responses:LogsResponse": (
        "get_log_events",
        "filter_log_events",
        "describe_log_streams",
    ),
    "moto.logs.utils:EventMessageFilter": ("matches",),
    "moto.moto_server.werkzeug_app:DomainDispatcherApplication": (),
    "moto.moto_server.werkzeug_app:MotoRequestHandler": ("log_request",),
    "moto.moto_server.werkzeug_app:create_backend_app": (),
    "moto.s3.exceptions:EntityTooSmall": (),
    "moto.s3.exceptions:InvalidPart": (),
    "moto.s3.exceptions:MalformedXML": (),
    "moto.s3.models:FakeDeleteMarker": (),
    "moto.s3.models:FakeKey": ("set_metadata",),
    "moto.s3.models:FakeMultipart": (),
    "moto.s3.models:S3Backend": (),
    "moto.s3.models:s3_backends": (),
    "moto.s3.responses:S3Response": ("parse_key_name",),
    "moto.sagemaker.exceptions:AWSValidationException": (),
    "moto.sagemaker.exceptions:ResourceInUseException": (),
    "moto.sagemaker.models:FakeEndpointConfig": ("validate_instance_type",),
    "moto.sagemaker.models:sagemaker_backends": (),
    "moto.sagemaker.responses:SageMakerResponse": ("_get_param", "_get_params"),
    "moto.scheduler.models:scheduler_backends": (),
    "moto.servicequotas.responses:ServiceQuotasResponse": (),
    "moto.settings:S3_UPLOAD_PART_MIN_SIZE": (),
}

# "module:Class.name" -> the parameters of moto's own, which ours must take; None if it is not a
# function
REPLACED_NAMES: dict[str, tuple[str, ...] | None] = {
    "moto.backends:list_of_moto_modules": (),
    "moto.iam.responses:IamResponse.simulate_principal_policy": ("self",),
    "moto.logs.responses:LogsResponse.describe_log_streams": ("self",),
    "moto.logs.responses:LogsResponse.filter_log_events": ("self",),
    "moto.logs.responses:LogsResponse.get_log_events": ("self",),
    "moto.s3.models:FakeDeleteMarker.instances_tracked": None,
    "moto.s3.models:FakeKey.__del__": ("self",),
    "moto.s3.models:FakeKey.dispose": ("self", "garbage"),
    "moto.s3.models:FakeKey.instances_tracked": None,
    "moto.s3.models:FakeKey.value": None,
    "moto.s3.models:FakeMultipart.complete": ("self", "body"),
    "moto.s3.models:FakeMultipart.instances_tracked": None,
    "moto.s3.models:S3Backend.url_paths": None,
    # Parameters that ours name; the rest are passed through.
    "moto.s3.models:S3Backend.copy_object": ("self",),
    "moto.s3.models:S3Backend.delete_object": ("self", "bucket_name", "key_name"),
    "moto.s3.models:S3Backend.put_object": ("self", "bucket_name", "key_name"),
    "moto.s3.models:S3Backend.upload_part_copy": ("self",),
    "moto.s3.responses:S3Response._handle_encoded_body": ("self", "body"),
    "moto.s3.responses:S3Response.bucket_response": ("self", "request", "full_url", "headers"),
    "moto.s3.responses:S3Response.get_object": ("self",),
    "moto.s3.responses:S3Response.key_response": ("self", "request", "full_url", "headers"),
    "moto.sagemaker.models:FakeEndpointConfig.validate_instance_type": ("self", "instance_type"),
    "moto.sagemaker.responses:SageMakerResponse.add_tags": ("self",),
    "moto.sagemaker.responses:SageMakerResponse.create_training_job": ("self",),
    "moto.sagemaker.responses:SageMakerResponse.delete_tags": ("self",),
    "moto.sagemaker.responses:SageMakerResponse.delete_training_job": ("self",),
    "moto.sagemaker.responses:SageMakerResponse.describe_training_job": ("self",),
    "moto.sagemaker.responses:SageMakerResponse.list_tags": ("self",),
    "moto.sagemaker.responses:SageMakerResponse.list_training_jobs": ("self",),
    "moto.sagemaker.responses:SageMakerResponse.search": ("self",),
    "moto.sagemaker.responses:SageMakerResponse.stop_training_job": ("self",),
    "moto.sagemaker.responses:SageMakerResponse.update_training_job": ("self",),
    "moto.servicequotas.responses:ServiceQuotasResponse.get_service_quota": ("self",),
    "moto.servicequotas.responses:ServiceQuotasResponse.list_aws_default_service_quotas": ("self",),
    "moto.servicequotas.responses:ServiceQuotasResponse.list_service_quotas": ("self",),
    "moto.servicequotas.responses:ServiceQuotasResponse.request_service_quota_increase": ("self",),
    "moto.servicequotas.responses:ServiceQuotasResponse.list_requested_service_quota_change_history_by_quota": (
        "self",
    ),
}

# The replaced calls that moto does not have.
ADDED_NAMES = frozenset(
    f"moto.{service}.responses:{name}"
    for service, name in (
        ("iam", "IamResponse.simulate_principal_policy"),
        ("sagemaker", "SageMakerResponse.delete_training_job"),
        ("sagemaker", "SageMakerResponse.stop_training_job"),
        ("sagemaker", "SageMakerResponse.update_training_job"),
        ("servicequotas", "ServiceQuotasResponse.list_service_quotas"),
        ("servicequotas", "ServiceQuotasResponse.request_service_quota_increase"),
        (
            "servicequotas",
            "ServiceQuotasResponse.list_requested_service_quota_change_history_by_quota",
        ),
    )
)

# Attributes of moto's objects that our code reads or writes, next to index.KEPT.
OBJECTS: dict[str, tuple[str, ...]] = {
    "FakeKey": (
        "arn",
        "bucket_name",
        "contentsize",
        "disposed",
        "etag",
        "last_modified",
        "metadata",
        "name",
        "version_id",
    ),
    "FakeDeleteMarker": ("_version_id", "last_modified", "version_id"),
    "FakeMultipart": ("metadata", "parts"),
    "FakeBucket": ("creation_date", "keys", "multiparts", "region_name", "versioning_status"),
    "S3Backend": ("buckets", "region_name", "tagger"),
    "SageMakerModelBackend": ("training_jobs", "endpoints", "_get_resource_from_arn"),
    "IAMBackend": ("get_group", "get_groups_for_user", "get_policy", "get_role", "get_user"),
    "Role": ("arn", "managed_policies", "permissions_boundary_arn", "policies"),
    "LogGroup": ("streams",),
    "LogsBackend": ("groups",),
}

# Parameters that our code passes to calls of moto.
CALLS: dict[str, tuple[str, ...]] = {
    "moto.s3.models:S3Backend.create_bucket": ("bucket_name", "region_name"),
    "moto.s3.models:FakeKey.__init__": (
        "name",
        "value",
        "account_id",
        "region_name",
        "bucket_name",
        "etag",
    ),
    "moto.s3.models:FakeDeleteMarker.__init__": ("key",),
    "moto.logs.models:LogsBackend.create_log_group": ("log_group_name", "tags"),
    "moto.logs.models:LogStream.__init__": ("log_group", "name"),
    "moto.iam.models:IAMBackend.create_role": (
        "role_name",
        "assume_role_policy_document",
        "path",
        "permissions_boundary",
        "description",
        "tags",
        "max_session_duration",
    ),
}
