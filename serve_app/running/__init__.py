"""Commands' access to a running application: watch and change it, drain it, stage its weights.

Enter: the name of an application on the connected cluster. Leave: typed status, counts of unanswered requests.
"""
