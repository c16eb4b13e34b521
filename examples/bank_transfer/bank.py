"""Money moves between two banks, and the books balance whatever dies in between.

    python -m examples.bank_transfer.bank prepare
    postroom worker examples.bank_transfer.bank:app
    python -m examples.bank_transfer.bank transfer t-1 alice bob 2500
    python -m examples.bank_transfer.bank balance alice

The bank that pays takes the money and writes the message in one transaction (outbox). The bank that is paid
books each transfer once, however often its message comes (guard); what it can never book it sends back in the
same way. There is no transaction over both, and no moment at which money is lost or doubled: it is with
alice, on its way, or with bob.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import msgspec
from sqlalchemy import Connection, Engine, create_engine, exc, text

import postroom
from postroom import guards

PAYS = create_engine(os.environ.get("BANK_DB", "sqlite:///bank.db"))
IS_PAID = create_engine(os.environ.get("OTHER_BANK_DB", "sqlite:///other_bank.db"))

QUEUE = os.environ.get("POSTROOM_URL", "sqlite:///queue.db")
LEASE = os.environ.get("LEASE", "30s")
USAGE = """usage: python -m examples.bank_transfer.bank prepare | transfer NUMBER SENDER RECEIVER CENTS
                                            | balance OWNER"""

app = postroom.App(QUEUE)
outbox = postroom.Outbox()  # a table of this name in each of the databases
for bank in (PAYS, IS_PAID):  # workers send what was paid or sent back, and book it
    app.outbox(outbox, bank, lease=os.environ.get("LEASE", "10s"))


@dataclass
class Transfer:
    number: str
    sender: str
    receiver: str
    cents: int


class Refused(Exception):
    """This transfer cannot be made; the text says why."""


# ---- the bank that pays ----


def pay(transfer: Transfer) -> bool:
    """Take the money and write the message: both, or neither. False: this transfer was made before.

    Whoever does not know whether it worked calls again, with the same number.
    """
    if transfer.cents <= 0:
        raise Refused("nothing to transfer: name a number of cents from 1 up")
    with PAYS.connect() as bank, outbox.transaction(bank):
        if not _first_time(bank, transfer):
            return False
        taken = bank.execute(
            text("UPDATE accounts SET cents = cents - :cents WHERE owner = :sender AND cents >= :cents"),
            {"cents": transfer.cents, "sender": transfer.sender},
        )
        if not taken.rowcount:
            raise Refused(f"{transfer.sender} has less than {transfer.cents} cents")
        body = msgspec.json.encode(transfer)
        outbox.send(bank, "transfers", body, key=transfer.receiver, id=transfer.number)
    return True


def _first_time(bank: Connection, transfer: Transfer) -> bool:
    body, number = msgspec.json.encode(transfer).decode(), transfer.number
    known = bank.execute(text("SELECT body FROM transfers WHERE number = :number"), {"number": number})
    if (row := known.first()) is None:
        adds = text("INSERT INTO transfers (number, body, state) VALUES (:number, :body, 'paid')")
        bank.execute(adds, {"number": number, "body": body})
        return True
    if row.body != body:
        raise Refused(f"{number} is the number of another transfer: choose a new one")
    return False


@app.subscribe("refunds", group="bank", lease=LEASE)
@guards.once(PAYS.connect)
def give_back(transfer: Transfer, connection: Connection) -> None:
    """The other bank could not book it."""
    credited = connection.execute(
        text("UPDATE accounts SET cents = cents + :cents WHERE owner = :sender"),
        {"cents": transfer.cents, "sender": transfer.sender},
    )
    if not credited.rowcount:  # closed meanwhile: somebody has to find its owner
        raise postroom.Dead(f"there is no account of {transfer.sender} any more")
    ends = text("UPDATE transfers SET state = 'given back' WHERE number = :number")
    connection.execute(ends, {"number": transfer.number})


# ---- the bank that is paid ----


@app.subscribe("transfers", group="other-bank", lease=LEASE)
@guards.once(IS_PAID.connect)
def book(transfer: Transfer, connection: Connection) -> None:
    """In the transaction in which the guard writes down that it has seen this transfer."""
    booked = connection.execute(
        text("UPDATE accounts SET cents = cents + :cents WHERE owner = :receiver"),
        {"cents": transfer.cents, "receiver": transfer.receiver},
    )
    if not booked.rowcount:  # there is no such account: the money goes back
        body = msgspec.json.encode(transfer)
        outbox.send(connection, "refunds", body, key=transfer.sender, id=transfer.number)


# ---- at the counter ----


def prepare() -> None:
    """The topics, and the tables of both banks, of outbox and guards. Once more does no harm."""
    with postroom.sync.connect(QUEUE) as mq:
        mq.create_topic("transfers", partitions=4, exist_ok=True)
        mq.create_topic("refunds", partitions=4, exist_ok=True)
    name = "VARCHAR(50) NOT NULL PRIMARY KEY"
    for engine in (PAYS, IS_PAID):
        with engine.begin() as bank:
            bank.execute(text(f"CREATE TABLE IF NOT EXISTS accounts (owner {name}, cents BIGINT NOT NULL)"))
            bank.execute(
                text(f"CREATE TABLE IF NOT EXISTS transfers (number {name}, body TEXT, state VARCHAR(20))")
            )
            outbox.create_table(bank)
            guards.create_tables(bank)


def open_account(engine: Engine, owner: str, cents: int) -> None:
    """With so much in it; one that is there stays as it is."""
    if balance(engine, owner) is None:
        with engine.begin() as bank:
            values = {"owner": owner, "cents": cents}
            bank.execute(text("INSERT INTO accounts (owner, cents) VALUES (:owner, :cents)"), values)


def balance(engine: Engine, owner: str) -> int | None:
    """None: there is no such account."""
    with engine.connect() as bank:
        asked = bank.execute(text("SELECT cents FROM accounts WHERE owner = :owner"), {"owner": owner})
        return asked.scalar_one_or_none()


def state_of(number: str) -> str:
    with PAYS.connect() as bank:
        asked = bank.execute(text("SELECT state FROM transfers WHERE number = :number"), {"number": number})
        return str(asked.scalar_one())


def main(*args: str) -> None:
    match args:
        case ["prepare"]:
            prepare()
            open_account(PAYS, "alice", 10_000)
            open_account(IS_PAID, "bob", 0)
        case ["transfer", number, sender, receiver, cents] if cents.isdecimal():
            new = pay(Transfer(number, sender, receiver, int(cents)))
            print("paid" if new else f"was {state_of(number)} before")
        case ["balance", owner]:
            found = [cents for bank in (PAYS, IS_PAID) if (cents := balance(bank, owner)) is not None]
            print(f"{owner} has {found[0]} cents" if found else f"there is no account of {owner}")
        case _:
            raise Refused(USAGE)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Refused as refusal:
        sys.exit(str(refusal))
    except exc.DBAPIError as error:
        sys.exit(f"{error.orig}: run `python -m examples.bank_transfer.bank prepare` first")
