"""The public names of the package. Type checkers and `vescale_fsdp.lazy` read this list."""

from vescale_fsdp.elastic.job import ElasticJob as ElasticJob, TrainingState as TrainingState
from vescale_fsdp.elastic.membership import Membership as Membership, Quorum as Quorum
from vescale_fsdp.elastic.store_membership import StoreMembership as StoreMembership
