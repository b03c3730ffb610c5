"""The one small file that a federation is made from."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedshift.errors import InputError
from fedshift.federation.engines.nvflare.kits import COORDINATOR_USER
from fedshift.yamlfiles import read_yaml

_NAME = r"[a-z0-9][a-z0-9-]{0,40}"
_RESERVED = {"server", "all", "coordinator", "admin"}


class Project(BaseModel):
    """`sites` are the names that runs use for sources and targets. `address` is where sites reach the coordinator,
    HOST:PORT. `observers` may look at the federation's state and nothing else. A site that has not been heard of for
    `lost_after` seconds is taken for lost."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    address: str
    sites: tuple[str, ...] = Field(min_length=1)
    observers: tuple[str, ...] = ()
    lost_after: int = Field(30, ge=5)

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not re.fullmatch(_NAME, name):
            raise ValueError(f"{name!r}: use small letters, digits and hyphens")
        return name

    @field_validator("address")
    @classmethod
    def _host_and_port(cls, address: str) -> str:
        host, colon, port = address.rpartition(":")
        if not colon or not re.fullmatch(r"[A-Za-z0-9.-]+", host) or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{address!r}: write HOST:PORT, such as fl.example.org:8002")
        return address

    @model_validator(mode="after")
    def _names(self) -> Project:
        for site in self.sites:
            if not re.fullmatch(_NAME, site) or site in _RESERVED or site == self.host:
                raise ValueError(f"site {site!r}: use small letters, digits and hyphens, and no reserved name")
        if len(set(self.sites)) != len(self.sites):
            raise ValueError("a site is listed twice")
        for person in self.observers:
            if not re.fullmatch(r"[A-Za-z0-9._-]+@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}", person):
                raise ValueError(f"observer {person!r}: write an e-mail address")
            if person == COORDINATOR_USER:
                raise ValueError(f"observer {person!r} is the coordinator's own name")
        return self

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def read_project(path: Path) -> Project:
    if not path.exists():
        raise InputError("deploy-project", f"there is no file {path}")
    values = read_yaml(path, "deploy-project")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError("deploy-project", f"{path} must hold keys and values: name, address, sites")
    try:
        return Project(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"{where}: {first['msg']}" if where else first["msg"]
        raise InputError("deploy-project", f"{path}: {message}") from None
